"""The embedded engine: continuous batching over unmodified transformers modules."""
