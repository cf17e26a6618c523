"""Layers with a state on a GPU: one more token for each of many requests, and chunks of prompts."""
