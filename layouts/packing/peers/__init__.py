"""Layouts whose kernels are other packages': torch's tinygemm, GemLite and Humming."""
