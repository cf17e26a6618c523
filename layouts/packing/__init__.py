"""Layouts: how a weight's bytes lie for a kernel, each in a file of its own, and their registry."""
