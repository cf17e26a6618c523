"""Rounding with a layer's inputs in view, whatever the format."""
