"""Attention over plain pages on a CPU: keys and values of 16 or 32 bits, compiled by numba."""
