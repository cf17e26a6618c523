"""How torch's INT4 kernels take scales and zeros, on CPU and CUDA: `w = (code - 8) * s + z`.

`s` and `z` of a group are neighbours: `[K/g, N, 2]`. This file holds no layout, since each kernel has its own
order of codes.
"""

import torch
from torch import Tensor

from ..formats.int4 import Int4, Int4Weight
from ..formats.weight_format import Weight
from .layout import Problem

GROUP_SIZES = (32, 64, 128, 256)
MIDDLE_CODE = 8


def refuses_groups(spec: Int4) -> str | None:
    """Return why both of torch's kernels refuse a group size; None if they take it."""
    if spec.group_size not in GROUP_SIZES:
        return f"takes groups of {', '.join(map(str, GROUP_SIZES))}, not {spec.group_size}"
    return None


def int4_of(problem: Problem) -> Int4:
    """Return the spec of an INT4 problem; TypeError for any other format."""
    if not isinstance(problem.spec, Int4):
        raise TypeError(f"{problem.spec.label} is not INT4")
    return problem.spec


def require_int4(weight: Weight, layout: str) -> Int4Weight:
    """Return `weight`, which must be INT4; TypeError for any other format, which `refuses` would have
    refused.
    """
    if not isinstance(weight, Int4Weight):
        raise TypeError(f"layout {layout} packs Int4Weight, not {type(weight).__name__}")
    return weight


def scale_and_zero(weight: Int4Weight, dtype: torch.dtype) -> Tensor:
    """Return [K/g, N, 2] in `dtype`: the scale, and the weight of code 8, which is `(8 - zero_point) *
    scale`.
    """
    scale = weight.scale.float()
    zero = (MIDDLE_CODE - weight.zero_point.float()) * scale
    return torch.stack((scale, zero), dim=-1).transpose(0, 1).contiguous().to(dtype)


def pad_rows(weight: Int4Weight, multiple: int) -> Int4Weight:
    """Append rows of scale 0 to `weight` until N is a multiple of `multiple`."""
    missing = -weight.shape[0] % multiple
    if not missing:
        return weight

    def padded(tensor: Tensor) -> Tensor:
        return torch.cat((tensor, tensor.new_zeros(missing, tensor.shape[1])))

    return weight.with_tensors({name: padded(tensor) for name, tensor in weight.tensors().items()})
