"""A pass over a text: what is learned of each layer's inputs, and the layers solved by it."""
