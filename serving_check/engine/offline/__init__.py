"""The engine's storage of keys and values used offline, without a server."""
