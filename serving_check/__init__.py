"""The embedded engine, its server, the load generator, the checks and the gate that decides."""
