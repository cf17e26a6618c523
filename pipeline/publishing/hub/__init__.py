"""Publishing to the Hugging Face Hub: one atomic commit, resumable, read back, made public last."""
