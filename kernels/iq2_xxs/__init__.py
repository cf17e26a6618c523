"""IQ2_XXS: the codebook, the bytes that our kernels read, and the products."""
