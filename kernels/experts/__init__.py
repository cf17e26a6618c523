"""Grouped products of mixture-of-experts layers: routing, unquantized weights, INT4 weights."""
