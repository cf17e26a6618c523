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


def _patch_the_language_once_a_kernel() -> None:
    """Triton's interpreter patches `triton.language` again for each function that a kernel calls, which took
    half of these tests' time. Here a function whose modules are patched already finds them as they are.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    patch = interpreter._patch_lang

    def patch_lang(function):
        used = [module for module in function.__globals__.values() if module is tl or module is tl.core]
        is_patched = all(module.static_print is print for module in used)
        return interpreter._LangPatchScope() if used and is_patched else patch(function)

    interpreter._patch_lang = patch_lang


if os.environ.get("TRITON_INTERPRET") == "1":
    _keep_splats_of_comparisons_boolean()
    _patch_the_language_once_a_kernel()
