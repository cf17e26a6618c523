"""How keys and values lie in pages, are stored and are attended over: one file for each format."""
