"""The embedded continuous-batching engine, over unmodified transformers modules."""
