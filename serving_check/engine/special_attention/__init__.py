"""Attention of models that pass less than their queries, keys and values to AttentionInterface, or more."""
