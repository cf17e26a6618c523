"""KV formats: how keys and values are stored in pages and attended over. One file for each format."""
