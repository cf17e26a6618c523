"""Weight formats: what a quantized weight's numbers mean, and nothing about how a kernel wants them."""
