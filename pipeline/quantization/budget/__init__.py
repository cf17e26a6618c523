"""A budget of bits: what each group of layers costs in each format, and which get which."""
