"""NVFP4 weights: `packing.py` defines the bytes, `decoder.py` prepares them for `kernels/hopper/`."""
