"""KVarN's pages: what their codes mean in torch, and the Triton kernels that write and read them."""
