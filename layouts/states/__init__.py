"""State formats: what a layer keeps for each request that is no page."""
