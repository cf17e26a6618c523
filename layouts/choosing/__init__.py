"""Which layout serves a product: candidates timed at every M, and the plan that keeps what was chosen."""
