"""Products with packed weights on GPUs of compute capability 8.0 and above."""
