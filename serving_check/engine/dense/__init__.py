"""A step of dense models on a CPU, without transformers' modules around our own kernels."""
