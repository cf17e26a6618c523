"""A pass over a text: statistics of each layer's inputs, and the layers that are solved with them."""
