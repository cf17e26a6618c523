"""INT4 weights: `packing.py` is the bytes, `decoder.py` their way to a product on Hopper.

`planes.py` builds INT8 weights from two planes of INT4.
"""
