"""Layouts: how a weight's bytes are arranged for a kernel. One file for each layout, and their registry."""
