"""What kernels of all coded keys and values share."""
