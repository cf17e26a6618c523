"""Attention over paged keys and values: decode, prefill, and rooms for pages of coded ones."""
