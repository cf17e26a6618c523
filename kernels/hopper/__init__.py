"""Matrix products on Hopper whose weights are packed: `gemm.py` is the entry, `ptx.py` the inline PTX."""
