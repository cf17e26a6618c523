"""CPU kernels that are compiled by numba: products by packed weights, and the threads they run on."""
