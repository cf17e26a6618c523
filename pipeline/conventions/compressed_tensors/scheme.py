"""The scheme seam: how compressed-tensors stores one weight format, and how a config group says so.

There is one file in this folder for each scheme, registered by its weight format's name, or by another name
if it stores a variant of the format; `all_schemes.py` lists the schemes. The compressed-tensors library is
not used: its bytes are written and read here, and the benchmark `interchange.py` compares our bytes with the
library's in another environment.
"""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from ....base.registry import Registry
from ....layouts.formats.e4m3 import BLOCK
from ....layouts.formats.input_format import InputFormat
from ....layouts.formats.weight_format import Weight, WeightFormat
from ...checkpoints.checkpoint import Checkpoint
from ..convention import StoredWeight

METHOD = "compressed-tensors"
EIGHT_BITS = {"num_bits": 8, "type": "float", "symmetric": True}
FP8_PER_TOKEN = EIGHT_BITS | {"strategy": "token", "dynamic": True}
"""The config of inputs in E4M3 with a dynamic scale for each token."""
FP8_STATIC = EIGHT_BITS | {"strategy": "tensor", "dynamic": False}
"""The config of inputs in E4M3 with one calibrated scale for all."""
FP8_PER_BLOCK = EIGHT_BITS | {"strategy": "group", "group_size": BLOCK, "dynamic": True}
"""The config of inputs in E4M3 with a dynamic scale for every 128 inputs of a token."""


class Scheme(Protocol):
    """One way of storing a weight that compressed-tensors has a name for."""

    def __hash__(self) -> int: ...

    @property
    def format(self) -> str:
        """Return the compressor's name, as config groups give it: `pack-quantized`."""
        ...

    @property
    def reads(self) -> str:
        """Return the form that the scheme reads, in a few words for an error: `INT4 weight-only
        pack-quantized`.
        """
        ...

    @property
    def suffix(self) -> str:
        """Return the suffix of the tensor by which a stored module is recognized: `<module><suffix>`."""
        ...

    @property
    def dtypes(self) -> tuple[torch.dtype, ...] | None:
        """Return the dtypes of a module's recognized tensor that identify this scheme; None if its name is
        enough.
        """
        ...

    def recognizes(self, group: Mapping[str, Any]) -> bool:
        """Say whether a config group is of this scheme; the group has a `format`, its own or the config's."""
        ...

    def stored(self, checkpoint: Checkpoint, module: str, group: Mapping[str, Any]) -> StoredWeight:
        """Return the weight of `module`, which `group` targets. Raise UserError if the tensors contradict the
        config group.
        """
        ...


@runtime_checkable
class WritableScheme(Scheme, Protocol):
    """A scheme in which weights can be written as well as read; all schemes are in one registry."""

    def refuses(self, spec: WeightFormat) -> str | None:
        """Return None if the scheme can store weights of `spec`, otherwise the reason in a few words."""
        ...

    def tensors(self, module: str, weight: Weight, inputs: InputFormat | None = None) -> dict[str, Tensor]:
        """Return the checkpoint tensors that store `<module>.weight`, by full name."""
        ...

    def weights_config(self, spec: WeightFormat) -> dict[str, Any]:
        """Return the `weights` section of a config group."""
        ...

    def inputs_config(self, spec: WeightFormat) -> dict[str, Any] | None:
        """Return the `input_activations` section; None if inputs are not rounded."""
        ...


def rounds_to_fp8(group: Mapping[str, Any]) -> bool:
    """Say whether a config group rounds inputs to E4M3, with scales computed for each token."""
    return FP8_PER_TOKEN.items() <= (group.get("input_activations") or {}).items()


SCHEMES: Registry[Scheme] = Registry("compressed-tensors scheme")
