"""The engine's storage of keys and values, without a server."""
