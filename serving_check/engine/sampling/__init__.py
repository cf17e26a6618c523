"""Drawing tokens: parameters of rows, adjusted logits, the sampler."""
