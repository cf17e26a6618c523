"""INT4 matrix products: `hopper.py` is the fast path, `swap_ab.py` the bytes and the portable kernel."""
