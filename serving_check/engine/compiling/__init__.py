"""The engine's compiled layers and CUDA graphs."""
