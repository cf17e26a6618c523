"""Products in E4M3 (W8A8) on GPUs of compute capability 8.9 and above, and the rounding of their inputs."""
