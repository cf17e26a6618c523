"""Modules that replace a model's own: linear layers and experts over packed weights."""
