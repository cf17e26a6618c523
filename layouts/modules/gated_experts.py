"""A layer's experts as one custom op: both products, SiLU between them, and the sum over a token's experts.

A traced graph serves any number of tokens, so kernels for a single token must be chosen inside an op. The op
serves SiLU-gated experts without biases, if their layout has such kernels; all others use `experts.py` alone.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, library, nn
from torch.nn import functional

from ..packing.all_layouts import LAYOUTS
from ..packing.layout import PackedWeight
from .linear import spec_of_text


@runtime_checkable
class GatedExpertsLayout(Protocol):
    """The further methods of an `ExpertsLayout` that can compute a layer's experts in one op."""

    def serves_gated(self, gate_up: PackedWeight, down: PackedWeight) -> bool: ...

    def gated_experts(
        self, x: Tensor, expert: Tensor, weight: Tensor, gate_up: PackedWeight, down: PackedWeight
    ) -> Tensor:
        """Return y [T, N]: `sum_j weight[t, j] * down(silu(gate(x[t])) * up(x[t]))` over the experts of token
        t.
        """
        ...


def is_served_whole(experts: nn.Module, parts: Mapping[str, Sequence[PackedWeight]]) -> bool:
    """Say whether `gated_experts` can replace the whole forward of a module with the given weights
    (`PackedExperts`).
    """
    module: Any = experts
    if not module.has_gate or module.has_bias or getattr(module, "has_post_expert_norm", False):
        return False
    if any(len(parts.get(name, ())) != 1 for name in ("gate_up_proj", "down_proj")) or len(parts) != 2:
        return False
    (gate_up,), (down,) = parts["gate_up_proj"], parts["down_proj"]
    layout = LAYOUTS[gate_up.layout]
    return (
        gate_up.layout == down.layout
        and isinstance(layout, GatedExpertsLayout)
        and layout.serves_gated(gate_up, down)
        and _gates_by_silu(module)
    )


def _gates_by_silu(experts: Any) -> bool:
    """Say whether the activation is SiLU. The activation is tried on numbers: architectures name and
    interleave it differently."""
    probe = torch.linspace(-60, 50, 64, dtype=torch.float32, device="cpu").view(2, 32)
    gate, up = probe.chunk(2, dim=-1)
    return torch.allclose(experts._apply_gate(probe), functional.silu(gate) * up)


def gated_experts(
    x: Tensor,
    expert: Tensor,
    weight: Tensor,
    weights: tuple[PackedWeight, PackedWeight],
    specs: tuple[str, str],
) -> Tensor:
    """Call the op with the weights gate_up and down, passed as `packed_matmul` passes a weight."""
    gate_up, down = weights
    return torch.ops.scalegate.gated_experts(
        x.contiguous(),
        expert,
        weight,
        [*gate_up.tensors.values(), *down.tensors.values()],
        gate_up.layout,
        *specs,
        [*gate_up.shape, *down.shape],
        " ".join(gate_up.tensors),
        " ".join(gate_up.attributes),
        [*gate_up.attributes.values(), *down.attributes.values()],
    )


@library.custom_op("scalegate::gated_experts", mutates_args=())
def _gated_experts(
    x: Tensor,
    expert: Tensor,
    weight: Tensor,
    tensors: list[Tensor],
    layout: str,
    gate_up_spec: str,
    down_spec: str,
    shapes: list[int],
    names: str,
    attribute_names: str,
    attributes: list[int],
) -> Tensor:
    """Compute x [T, K] to [T, N]; the arguments are tensors, shapes and attributes of gate_up, then those of
    down.
    """
    tensor_names, number_names = names.split(), attribute_names.split()

    def packed(at: int) -> PackedWeight:
        of_part = slice(at * len(tensor_names), (at + 1) * len(tensor_names))
        numbers = slice(at * len(number_names), (at + 1) * len(number_names))
        return PackedWeight(
            layout,
            spec_of_text((gate_up_spec, down_spec)[at]),
            tuple(shapes[3 * at : 3 * at + 3]),
            x.dtype,
            dict(zip(tensor_names, tensors[of_part], strict=True)),
            dict(zip(number_names, attributes[numbers], strict=True)),
        )

    of_all = cast(GatedExpertsLayout, LAYOUTS[layout])
    return of_all.gated_experts(x, expert, weight, packed(0), packed(1))


@_gated_experts.register_fake
def _(
    x: Tensor,
    expert: Tensor,
    weight: Tensor,
    tensors: list[Tensor],
    layout: str,
    gate_up_spec: str,
    down_spec: str,
    shapes: list[int],
    names: str,
    attribute_names: str,
    attributes: list[int],
) -> Tensor:
    return x.new_empty(x.shape[0], shapes[4])
