"""torch's own convention for INT4 weights, shared by its CPU and CUDA kernels: `w = (code - 8) * s + z`.

`s` and `z` lie side by side for each group: `[K/g, N, 2]`. Not a layout: the order of the codes is each
kernel's own.
"""

import torch
from torch import Tensor

from ..formats.int4 import Int4, Int4Weight
from ..formats.weight_format import Weight
from .layout import Problem

GROUP_SIZES = (32, 64, 128, 256)
MIDDLE_CODE = 8


def refuses_groups(spec: Int4) -> str | None:
    """Group sizes that both of torch's kernels refuse."""
    if spec.group_size not in GROUP_SIZES:
        return f"takes groups of {', '.join(map(str, GROUP_SIZES))}, not {spec.group_size}"
    return None


def int4_of(problem: Problem) -> Int4:
    """The spec of a problem that is known to be INT4; TypeError for any other."""
    if not isinstance(problem.spec, Int4):
        raise TypeError(f"{problem.spec.label} is not INT4")
    return problem.spec


def require_int4(weight: Weight, layout: str) -> Int4Weight:
    """`weight`, where it is INT4; a caller that did not ask `refuses` first gets a TypeError."""
    if not isinstance(weight, Int4Weight):
        raise TypeError(f"layout {layout} packs Int4Weight, not {type(weight).__name__}")
    return weight


def scale_and_zero(weight: Int4Weight, dtype: torch.dtype) -> Tensor:
    """[K/g, N, 2] in `dtype`: the scale, and the weight of code 8, which is `(8 - zero_point) * scale`."""
    scale = weight.scale.float()
    zero = (MIDDLE_CODE - weight.zero_point.float()) * scale
    return torch.stack((scale, zero), dim=-1).transpose(0, 1).contiguous().to(dtype)


def pad_rows(weight: Int4Weight, multiple: int) -> Int4Weight:
    """`weight` with rows of scale 0 added until `multiple` divides N."""
    missing = -weight.shape[0] % multiple
    if not missing:
        return weight

    def padded(tensor: Tensor) -> Tensor:
        return torch.cat((tensor, tensor.new_zeros(missing, tensor.shape[1])))

    return weight.with_tensors({name: padded(tensor) for name, tensor in weight.tensors().items()})
