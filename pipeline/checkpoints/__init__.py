"""Checkpoints as they lie in folders and on the Hub: their files, tensors and origins, nothing loaded."""
