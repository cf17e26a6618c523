"""Products with INT4 weights: `hopper.py` tells what each file does, `swap_ab.py` is the portable kernel."""
