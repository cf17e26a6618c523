"""GPU kernels and, beside each, its plain-torch reference. Imports nothing else of Scalegate."""
