"""INT4 weights: `packing.py` defines the bytes, `decoder.py` prepares them for the product on Hopper.

`planes.py` builds INT8 weights from two planes of INT4.
"""
