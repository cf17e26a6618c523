"""KVarN's pages: the meaning of their codes in torch, and the Triton kernels that write and read them."""
