"""Experts on a CPU: a dense layout multiplies each expert's rows, one expert after another.

On a GPU the host would have to wait to learn which experts are used, so `grouped_experts.py` serves GPUs.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ...base.batch_invariance import INVARIANCE_MODES
from ..formats.weight_format import Weight
from .layout import Layout, PackedWeight, Problem, Serves, emulates_inputs, rounds_inputs
from .routing import Routing

SUFFIX = "_per_expert"


class PerExpert:
    """Uses a dense layout for every expert; the experts' packed tensors are stacked, [E, ...]."""

    def __init__(self, dense: Layout):
        self.dense = dense
        self.name = dense.name + SUFFIX
        self.kernel = dense.kernel
        self.rounds_inputs = rounds_inputs(dense)
        self.emulates = emulates_inputs(dense)

    def refuses(self, problem: Problem) -> str | None:
        serves = Serves(
            device="cpu",
            experts=True,
            invariance_modes=INVARIANCE_MODES,
            rounds_inputs=self.rounds_inputs,
        )
        return serves.refuses(problem) or self.dense.refuses(replace(problem, experts=None))

    def pack_experts(self, weights: Sequence[Weight], dtype: torch.dtype) -> PackedWeight:
        packed = [self.dense.pack(weight, dtype) for weight in weights]
        tensors = {
            name: torch.stack([weight.tensors[name] for weight in packed]) for name in packed[0].tensors
        }
        shape = (len(packed), *packed[0].shape)
        return replace(packed[0], layout=self.name, shape=shape, tensors=tensors)

    def grouped_matmul(self, x: Tensor, packed: PackedWeight, routing: Routing) -> Tensor:
        flat = routing.expert.flatten()
        shared_by = len(flat) // max(1, len(x))
        y = x.new_empty(len(flat), packed.shape[1])
        for expert in flat.unique().tolist():
            rows = (flat == expert).nonzero()[:, 0]
            tensors = {name: tensor[expert] for name, tensor in packed.tensors.items()}
            weight = replace(packed, layout=self.dense.name, shape=packed.shape[1:], tensors=tensors)
            y[rows] = self.dense.matmul(x[rows // shared_by], weight)
        return y
