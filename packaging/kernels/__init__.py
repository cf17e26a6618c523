"""Scalegate's kernels, and a plugin that serves vLLM's quantized linear layers with them."""
