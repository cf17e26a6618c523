"""These tests run on a GPU, or in a process of their own under TRITON_INTERPRET=1, and nowhere else.

Triton decides when it is imported whether kernels are interpreted, so the Makefile gives these tests a run of
their own, and everybody else's tests keep the Triton that users have.
"""

import os

import torch

if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]
if torch.cuda.is_available():
    collect_ignore = ["test_gpu_engine.py"]
