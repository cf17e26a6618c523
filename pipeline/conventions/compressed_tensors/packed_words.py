"""compressed-tensors' `pack-quantized`: codes of a few bits in int32 words, in groups or whole rows.

Weights [N, K] are stored as `weight_packed` int32 [N, K * bits / 32], with the first code in the lowest bits,
`weight_scale` [N, K/g] and `weight_shape`. Codes are unsigned: half of the range is added to codes of
symmetric weights. The schemes define the meaning of codes and zero points.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ....base.errors import UserError
from ....layouts.formats.input_format import InputFormat
from ....layouts.formats.weight_format import Weight, WeightFormat
from ...checkpoints.checkpoint import Checkpoint
from ..convention import StoredWeight
from ..stored import FLOAT_DTYPES, require_tensor

FORMAT = "pack-quantized"
PACKED = ".weight_packed"
GROUP, CHANNEL = "group", "channel"
WORD_BITS = 32


def recognizes(group: Mapping[str, Any], bits: int) -> bool:
    """Say whether a config group has integer codes of this many bits, in this packing."""
    weights = group.get("weights") or {}
    return (weights.get("num_bits"), weights.get("type"), group["format"]) == (bits, "int", FORMAT)


def weights_config(bits: int, group_size: int | None, symmetric: bool) -> dict[str, Any]:
    """Return the `weights` section of a config group; without a group size if groups are whole rows."""
    return {
        "num_bits": bits,
        "type": "int",
        "strategy": CHANNEL if group_size is None else GROUP,
        "group_size": group_size,
        "symmetric": symmetric,
        "dynamic": False,
    }


def packed_tensors(module: str, weight: Weight, codes: Tensor, scale: Tensor) -> dict[str, Tensor]:
    """Return the checkpoint tensors of a module. codes: uint8 [N, K * bits / 8], as in the file"""
    return {
        f"{module}{PACKED}": words_of(codes),
        f"{module}.weight_scale": scale.contiguous(),
        f"{module}.weight_shape": torch.tensor(weight.shape, dtype=torch.int64),
    }


@dataclass(frozen=True)
class PackedWords:
    """Read the tensors and config group of a module; only shapes have been read before.

    group_size: columns that share a scale; None for whole rows
    """

    checkpoint: Checkpoint
    module: str
    n: int
    k: int
    group_size: int | None
    symmetric: bool
    names: tuple[str, ...]

    @classmethod
    def of(cls, checkpoint: Checkpoint, module: str, weights: Mapping[str, Any]) -> "PackedWords":
        """Return the tensors of a module. Raise UserError if the tensors contradict the config, or their form
        is not supported."""
        name = module + PACKED
        n, words = require_tensor(checkpoint, name, (torch.int32,)).shape
        if f"{module}.weight_g_idx" in checkpoint.tensors:
            raise UserError(
                f"{checkpoint.source}: {module} was quantized with activation ordering (weight_g_idx), "
                f"whose groups are not consecutive; quantize it with actorder=None or 'static'"
            )
        k = words * WORD_BITS // weights["num_bits"]
        strategy = weights.get("strategy")
        group_size = k if strategy == CHANNEL else weights.get("group_size")
        if strategy not in (GROUP, CHANNEL) or not isinstance(group_size, int) or group_size <= 0:
            raise UserError(
                f"{checkpoint.source}: {module} has strategy {strategy!r} with group_size {group_size!r}; "
                f"Scalegate reads 'group' and 'channel'"
            )
        if k % group_size:
            raise UserError(
                f"{checkpoint.source}: {name} has K = {k}, which group_size {group_size} does not divide"
            )
        require_tensor(checkpoint, f"{module}.weight_scale", FLOAT_DTYPES, (n, k // group_size))
        names = [name, f"{module}.weight_scale"]
        if f"{module}.weight_shape" in checkpoint.tensors:
            require_tensor(checkpoint, f"{module}.weight_shape", (torch.int64, torch.int32), (2,))
            names.append(f"{module}.weight_shape")
        symmetric = bool(weights.get("symmetric", True))
        if symmetric and f"{module}.weight_zero_point" in checkpoint.tensors:
            raise UserError(
                f"{checkpoint.source}: the config says {module} is symmetric, but it has "
                f"{module}.weight_zero_point"
            )
        whole = None if strategy == CHANNEL else group_size
        return cls(checkpoint, module, n, k, whole, symmetric, tuple(names))

    @property
    def groups(self) -> int:
        return 1 if self.group_size is None else self.k // self.group_size

    def stored(
        self,
        spec: WeightFormat,
        make: Callable[[Tensor, Tensor], Weight],
        *more: str,
        inputs: InputFormat | None = None,
    ) -> StoredWeight:
        """Return the stored weight, which `make` makes from the codes, uint8 [N, K * bits / 8], and the
        scales.

        more: names of other tensors that `make` reads
        """

        def read() -> Weight:
            self._check_shape()
            scale = self.checkpoint.read(f"{self.module}.weight_scale")
            return make(bytes_of(self.checkpoint.read(self.names[0])), scale)

        read_input = None if inputs is None else lambda: inputs
        names = (*self.names, *more)
        shape = self.n, self.k
        return StoredWeight(self.module, shape, spec, names, read, read_input, check=self._check_shape)

    def _check_shape(self) -> None:
        """Raise UserError if the stored shape is not that of the codes."""
        name = f"{self.module}.weight_shape"
        if name not in self.names:
            return
        shape = self.checkpoint.read(name).tolist()
        if shape != [self.n, self.k]:
            raise UserError(
                f"{self.checkpoint.source}: {name} is {shape}, but {self.names[0]} holds {[self.n, self.k]}"
            )


def words_of(codes: Tensor) -> Tensor:
    """Return uint8 [N, B] as int32 [N, B/4]: the same bytes on a little-endian machine."""
    _require_little_endian()
    # Flat, because a dimension of size 1 may carry a stride that a wider dtype refuses.
    return codes.reshape(-1).view(torch.int32).view(*codes.shape[:-1], -1)


def bytes_of(words: Tensor) -> Tensor:
    """Return int32 [N, B/4] as uint8 [N, B], as the inverse of `words_of`."""
    _require_little_endian()
    return words.reshape(-1).view(torch.uint8).view(*words.shape[:-1], -1)


def _require_little_endian() -> None:
    if sys.byteorder != "little":
        raise UserError("packed checkpoints are little-endian; this machine is not")
