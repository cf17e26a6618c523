"""State formats: the state of a layer for each request that is not stored in pages."""
