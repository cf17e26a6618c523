"""The gate's evidence: figures of answers, repeats and texts, the curve, and the verdict that keeps them."""
