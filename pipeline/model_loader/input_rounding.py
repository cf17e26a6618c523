"""Rounds the inputs of plain linear layers if their checkpoint quantizes activations as well.

The rounding is for models that are run with dequantized weights, as `layer_stream.py` runs them; packed
layers round by themselves (`layouts/modules/linear.py`).
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...layouts.formats.input_format import InputFormat

Parts = list[tuple[int, InputFormat]]
"""The parts of a weight, one below the other: each part's number of rows, and how its input is rounded."""


class InputRounding(TorchFunctionMode):
    """Rounds the input of every `F.linear` whose weight was registered; it recognizes a weight by its
    address.
    """

    def __init__(self) -> None:
        super().__init__()
        self._parts: dict[int, Parts] = {}
        self._names: dict[int, str] = {}
        self._unseen: set[str] = set()

    def add(self, name: str, weight: Tensor, parts: list[Parts]) -> None:
        """weight: [N, K] of one linear layer, or [E, N, K] of experts; parts: the parts of each"""
        slices = weight if weight.dim() == 3 else weight.unsqueeze(0)
        for matrix, its_parts in zip(slices, parts, strict=True):
            self._parts[matrix.data_ptr()] = its_parts
            self._names[matrix.data_ptr()] = name
        self._unseen.add(name)

    def drop(self, prefix: str) -> list[str]:
        """Forget the weights whose names begin with `prefix`; return those that no `F.linear` used."""
        for address in [address for address, name in self._names.items() if name.startswith(prefix)]:
            del self._parts[address], self._names[address]
        missed = sorted(name for name in self._unseen if name.startswith(prefix))
        self._unseen.difference_update(missed)
        return missed

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        parts = self._parts.get(args[1].data_ptr()) if func is nn.functional.linear else None
        if parts is None:
            return func(*args, **(kwargs or {}))
        self._unseen.discard(self._names[args[1].data_ptr()])
        return _rounded_linear(parts, *args, **(kwargs or {}))


def _rounded_linear(parts: Parts, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    rows = weight.split([count for count, _ in parts])
    y = torch.cat(
        [
            nn.functional.linear(rounding.round(x), part)
            for part, (_, rounding) in zip(rows, parts, strict=True)
        ],
        dim=-1,
    )
    return y if bias is None else y + bias
