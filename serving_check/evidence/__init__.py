"""What a gate has seen: figures of answers, repeats and texts, the curve, and the verdict that keeps them."""
