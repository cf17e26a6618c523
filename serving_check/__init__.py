"""The embedded engine, its server, the workload generator, the checks and the gate that decides."""
