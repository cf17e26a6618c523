"""These tests run on a GPU, or in a process of their own under TRITON_INTERPRET=1, and nowhere else.

Triton decides when it is imported whether kernels are interpreted, so the Makefile gives these tests a run of
their own, and everybody else's tests keep the Triton that users have.
"""

import os

import numpy as np
import torch

if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]
if torch.cuda.is_available():
    collect_ignore = ["test_gpu_engine.py"]


def _keep_splats_of_comparisons_boolean() -> None:
    """Triton 3.9's interpreter spreads a comparison of scalars over a block as integers of the type that was
    compared, and refuses them as a mask.
    """
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    splat = InterpreterBuilder.create_splat

    def create_splat(self, ret_ty, arg):
        if arg.data.dtype == np.bool_:
            return TensorHandle(np.full(ret_ty.shape, arg.data.item()), arg.dtype.scalar)
        return splat(self, ret_ty, arg)

    InterpreterBuilder.create_splat = create_splat


if os.environ.get("TRITON_INTERPRET") == "1":
    _keep_splats_of_comparisons_boolean()
