"""The convention seam: how a published checkpoint writes quantized weights down, and how one is written.

One file in this folder for each convention; `all_conventions.py` registers them. No convention knows a
kernel, and this file holds no logic beyond describing a weight that lies in a checkpoint.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from ...layouts.int4 import Int4Weight
from ...layouts.layout import Problem, QuantizedWeight
from ...layouts.nvfp4 import NVFP4Input
from ...layouts.registry import Registry

if TYPE_CHECKING:
    from ..checkpoints.checkpoint import Checkpoint


@dataclass(frozen=True)
class StoredWeight:
    """One linear weight [N, K] as it lies in a checkpoint: known from headers and config, no data read yet.

    weight_format: Int4Weight or NVFP4Weight; Tensor where it is only stored compactly (FP8 blocks)
    tensors:       the names of the checkpoint tensors it is made of
    read:          reads them and returns the weight, on the CPU
    read_input:    reads how the layer's input is quantized as well; None where it stays as it is
    """

    module: str
    shape: tuple[int, int]
    weight_format: type
    group_size: int
    integer_zero: bool
    tensors: tuple[str, ...]
    read: Callable[[], QuantizedWeight | Tensor]
    read_input: Callable[[], NVFP4Input] | None = None

    @property
    def is_quantized(self) -> bool:
        """Whether a layout can pack it; otherwise `read` gives an ordinary tensor."""
        return self.weight_format is not Tensor

    def problem(self, dtype: torch.dtype, device: torch.device) -> Problem:
        n, k = self.shape
        return Problem(self.weight_format, self.group_size, self.integer_zero, n, k, dtype, device)


class Convention(Protocol):
    """One way of writing quantized weights into a checkpoint."""

    name: str

    def recognizes(self, checkpoint: "Checkpoint") -> bool:
        """Whether the checkpoint declares this convention; nothing is validated yet."""
        ...

    def modules(self, checkpoint: "Checkpoint") -> dict[str, StoredWeight]:
        """Every quantized linear weight by its module's name in the checkpoint.

        Raises UserError where the scheme is not one we read, or the config and the tensors disagree.
        """
        ...

    def claims(self, checkpoint: "Checkpoint", module: str) -> bool:
        """Whether the config says that this linear module is quantized, by its name in the checkpoint."""
        ...


class ExportConvention(Convention, Protocol):
    """A convention that an INT4 artifact can be written in."""

    def tensors(self, module: str, weight: Int4Weight, symmetric: bool) -> dict[str, Tensor]:
        """The checkpoint tensors that stand for `<module>.weight`, by full name."""
        ...

    def quantization_config(
        self,
        modules: Mapping[str, int],
        symmetric: bool,
        ignore: Sequence[str],
        embeddings: Sequence[str] = (),
    ) -> dict[str, Any]:
        """What goes into `config.json`: `modules` maps each quantized module to its group size.

        `ignore` names the linear layers that stay unquantized, `embeddings` those modules that are none.
        """
        ...

    def file_metadata(
        self, modules: Mapping[str, int], shapes: Mapping[str, tuple[int, int]], plain: Sequence[str]
    ) -> dict[str, str]:
        """The safetensors header metadata that every file of the checkpoint carries.

        modules: each quantized module's group size; shapes: its (N, K); plain: names of all other tensors.
        """
        ...


CONVENTIONS: Registry[Convention] = Registry("convention")
EXPORTS: Registry[ExportConvention] = Registry("export convention")
