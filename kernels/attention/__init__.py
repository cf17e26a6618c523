"""Keys and values below eight bits: what codes mean in torch, and Triton kernels that read and write them."""
