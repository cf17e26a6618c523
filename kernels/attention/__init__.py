"""Attention over paged keys and values: decode and prefill kernels, and those of coded pages in rooms of their own."""
