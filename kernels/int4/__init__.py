"""INT4 weights: `packing.py` is the bytes, `decoder.py` their way to a product on Hopper.

`planes.py` makes INT8 of two of them.
"""
