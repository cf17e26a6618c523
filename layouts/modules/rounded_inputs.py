"""Ops of traced graphs that round a product's inputs in the kernel that makes them, and the product after it.

`serving_check/engine/compiling/rounding_pass.py` puts them into graphs. Codes are E4M3, with a scale a row.
"""

import math
from typing import cast

import torch
from torch import Tensor, library

from ...kernels.fp8 import fused_rounding
from ...kernels.fp8.round_rows import round_rows as round_rows_kernel
from ..packing.all_layouts import LAYOUTS
from ..packing.layout import PackedWeight, RoundedRowsLayout
from .linear import QuantizedLinear, spec_of_text


def takes_rounded(layout: str, spec: str) -> bool:
    """Say whether the product of a layout and a spec, as `packed_matmul` is given them, takes such codes."""
    of_name = LAYOUTS[layout]
    return isinstance(of_name, RoundedRowsLayout) and of_name.takes_rounded(spec_of_text(spec))


def linear_takes_rounded(linear: QuantizedLinear) -> bool:
    """Say the same of a module."""
    layout, spec = linear.layout, linear.packed.spec
    return isinstance(layout, RoundedRowsLayout) and layout.takes_rounded(spec)


@library.custom_op("scalegate::packed_matmul_rounded", mutates_args=())
def _packed_matmul_rounded(
    codes: Tensor,
    scales: Tensor,
    dtype: torch.dtype,
    tensors: list[Tensor],
    layout: str,
    spec: str,
    shape: list[int],
    names: str,
    attribute_names: str,
    attributes: list[int],
) -> Tensor:
    """Multiply codes [M, K] with scales [1, M] to [M, N]; the rest is as `packed_matmul` has it."""
    packed = PackedWeight(
        layout,
        spec_of_text(spec),
        (shape[0], shape[1]),
        dtype,
        dict(zip(names.split(), tensors, strict=True)),
        dict(zip(attribute_names.split(), attributes, strict=True)),
    )
    return cast(RoundedRowsLayout, LAYOUTS[layout]).matmul_rounded(codes, scales, packed, dtype)


@_packed_matmul_rounded.register_fake
def _(
    codes: Tensor,
    scales: Tensor,
    dtype: torch.dtype,
    tensors: list[Tensor],
    layout: str,
    spec: str,
    shape: list[int],
    names: str,
    attribute_names: str,
    attributes: list[int],
) -> Tensor:
    return codes.new_empty(codes.shape[0], shape[0], dtype=dtype)


@library.custom_op("scalegate::round_rows", mutates_args=())
def _round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round x [..., K] to codes [M, K] and scales [1, M]."""
    return round_rows_kernel(x.reshape(-1, x.shape[-1]).contiguous())


@_round_rows.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    return _codes_like(x, x.shape[-1])


@library.custom_op("scalegate::norm_and_round", mutates_args=())
def _norm_and_round(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, keeps: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return h and y of x's shape [..., K], codes [M, K] and scales [1, M] (`kernels/fp8/fused_rounding.py`).

    h is empty without a residual, and y unless it is kept.
    """
    k = x.shape[-1]
    rows = x.reshape(-1, k).contiguous()
    others = None if residual is None else residual.reshape(-1, k).contiguous()
    h, y, codes, scales = fused_rounding.norm_and_round(rows, others, weight, eps, keeps)
    return (
        h if residual is None else h.view(x.shape),
        y.view(x.shape) if keeps else y,
        codes,
        scales,
    )


@_norm_and_round.register_fake
def _(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, keeps: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    none = (0, x.shape[-1])
    h, y = x.new_empty(none if residual is None else x.shape), x.new_empty(x.shape if keeps else none)
    return h, y, *_codes_like(x, x.shape[-1])


@library.custom_op("scalegate::silu_and_round", mutates_args=())
def _silu_and_round(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """Round SiLU of the gate times up, gate_up [..., 2K], to codes [M, K] and scales [1, M]."""
    return fused_rounding.silu_and_round(gate_up.reshape(-1, gate_up.shape[-1]).contiguous())


@_silu_and_round.register_fake
def _(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    return _codes_like(gate_up, gate_up.shape[-1] // 2)


@library.custom_op("scalegate::also_rounded", mutates_args=())
def also_rounded(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """Return x [..., K], and say that codes [M, K] and scales [1, M] are its rounding. The pass takes this
    op away again.
    """
    return x.clone()


@also_rounded.register_fake
def _(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    return torch.empty_like(x)


def _codes_like(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    rows = math.prod(x.shape[:-1])
    return x.new_empty((rows, k), dtype=torch.float8_e4m3fn), x.new_empty((1, rows), dtype=torch.float32)
