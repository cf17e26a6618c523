"""The KVarN format of keys and values, on a CPU and on CUDA."""
