"""INT4 weights: `swap_ab.py` is the bytes and the portable kernel; `kernels/hopper/` multiplies by them."""
