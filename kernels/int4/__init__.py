"""INT4 weights: `packing.py` is the bytes, `decoder.py` and `portable.py` their ways to a product.

And INT8, as two of them: `planes.py`.
"""
