"""Finds the place of each linear weight in a model, and puts other weights into these places."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from ...layouts.formats.unquantized import Unquantized
from ...layouts.formats.weight_format import Weight
from ..conventions.convention import StoredWeight
from .layer_stream import LayerStream, Slot
from .linear_weights import LinearWeight
from .weight_map import Assignment


class Places:
    """The place of each linear weight in the model."""

    def __init__(self, assignments: Sequence[Assignment], linears: Sequence[LinearWeight]):
        self.linears = {linear.module: linear for linear in linears}
        by_tensor: dict[str, list[LinearWeight]] = defaultdict(list)
        for linear in linears:
            by_tensor[linear.tensor].append(linear)
        self.by_slot: dict[Slot, list[LinearWeight]] = defaultdict(list)
        for assignment in assignments:
            experts = assignment.expert_parts()
            names = (
                dict.fromkeys(assignment.names)
                if experts is None
                else {name: index for index, parts in enumerate(experts) for name in parts}
            )
            for name, expert in names.items():
                for linear in by_tensor.get(name, []):
                    which = expert if linear.expert is None else linear.expert
                    self.by_slot[assignment.target, which].append(linear)

    def modules(self, slot: Slot) -> list[str]:
        return [linear.module for linear in self.by_slot.get(slot, [])]

    def of_layer(self, name: str) -> list[str]:
        slots = [slot for slot in self.by_slot if slot[0].startswith(f"{name}.")]
        return [module for slot in slots for module in self.modules(slot)]


@contextmanager
def serve(stream: LayerStream, weights: Mapping[str, Weight], places: Places) -> Iterator[None]:
    """Inside the `with` block, the loader uses `weights`, by module, instead of the weights on disk."""
    by_tensor: dict[str, list[tuple[LinearWeight, Weight]]] = defaultdict(list)
    for module, weight in weights.items():
        linear = places.linears[module]
        by_tensor[linear.tensor].append((linear, weight))
    before = dict(stream.loader.stored)
    # Parameters made of several tensors are put together on the CPU.
    whole = {
        assignment.names[0]: stream.device
        for assignment in stream.assignments
        if assignment.converter is None and assignment.expert_parts() is None
    }
    for tensor, parts in by_tensor.items():
        linear = parts[0][0]
        stream.loader.stored[tensor] = StoredWeight(
            linear.module,
            (linear.n, linear.k),
            Unquantized(),
            (tensor,),
            partial(_patched, stream, tensor, parts, whole.get(tensor, torch.device("cpu"))),
        )
    yield
    stream.loader.stored = before


def _patched(
    stream: LayerStream, tensor: str, parts: Sequence[tuple[LinearWeight, Weight]], device: torch.device
) -> Tensor:
    """Return a checkpoint's tensor with solved weights in it; on `device` if it is one weight."""
    if len(parts) == 1 and parts[0][0].expert is None and parts[0][0].rows is None:
        return parts[0][1].to(device).dequantize(stream.model.dtype)
    whole = stream.checkpoint.read(tensor)
    for linear, weight in parts:
        part = whole if linear.expert is None else whole[linear.expert]
        lying = part.T if linear.transposed else part
        lying[linear.row_slice] = weight.dequantize(whole.dtype)
    return whole


def kind_of(module: str) -> str:
    """Return an expert's name without its own number, which comes after the layer's number; any other name is
    returned unchanged.
    """
    parts = module.split(".")
    numbers = [index for index, part in enumerate(parts) if part.isdigit()]
    return ".".join(part for index, part in enumerate(parts) if index not in numbers[1:])
