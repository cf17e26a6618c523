"""GPU kernels and, beside each, its plain-torch reference. This package imports nothing else of Scalegate."""
