"""Putting a checkpoint's weights into the unmodified transformers model, quantized linears packed."""
