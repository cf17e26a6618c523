"""GGUF, llama.cpp's file format: a whole model written from a checkpoint."""
