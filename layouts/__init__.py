"""What a quantized weight means (formats) and how its bytes are arranged for a kernel (layouts)."""
