"""What the kernels of all coded KV formats share."""
