"""Functions that the kernels of all coded KV formats share."""
