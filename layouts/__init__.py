"""The meaning of a quantized weight (formats) and the arrangement of its bytes for a kernel (layouts)."""
