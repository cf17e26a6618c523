"""The modules that stand in a model's place of its own: linear layers and experts over packed weights."""
