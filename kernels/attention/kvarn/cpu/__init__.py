"""KVarN's pages on a CPU, compiled by numba."""
