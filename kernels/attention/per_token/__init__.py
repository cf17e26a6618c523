"""Keys and values coded a token at a time, as INT4 and as NVFP4: Triton kernels."""
