"""Conventions: how published checkpoints write quantized weights down. One file or folder for each."""
