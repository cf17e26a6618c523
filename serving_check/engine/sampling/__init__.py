"""Drawing tokens: sampling parameters by row, logit adjustments, the sampler."""
