"""NVFP4 weights: `packing.py` is the bytes, `decoder.py` their way into `kernels/hopper/`."""
