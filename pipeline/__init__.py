"""Recipes, quantizers, checkpoint conventions, publishing, and the command line."""
