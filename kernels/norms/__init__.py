"""Norms on a CPU, compiled by numba."""
