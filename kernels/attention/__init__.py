"""Attention over paged keys and values: decode, prefill, and folders for coded pages."""
