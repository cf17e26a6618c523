"""Grouped products of mixture-of-experts layers: routing, unquantized, INT4 and NVFP4 weights."""
