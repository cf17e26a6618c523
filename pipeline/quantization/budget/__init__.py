"""A budget of bits: the cost of each group of layers in each format, and the choice."""
