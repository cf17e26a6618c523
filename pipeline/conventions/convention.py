"""The convention seam: how a published checkpoint writes quantized weights down, and how such a checkpoint is
written.

There is one file in this folder for each convention; `all_conventions.py` registers the conventions. No
convention knows a kernel, and this file has no logic beyond describing a weight in a checkpoint.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from ...base.registry import Registry
from ...layouts.formats.input_format import InputFormat
from ...layouts.formats.unquantized import Unquantized
from ...layouts.formats.weight_format import Weight, WeightFormat
from ...layouts.packing.layout import Problem
from ..checkpoints.checkpoint import Checkpoint


@dataclass(frozen=True)
class StoredWeight:
    """One linear weight [N, K] in a checkpoint: known from headers and config, with no data read yet.

    spec:       its format; Unquantized if it is only stored in fewer bits (FP8 blocks)
    tensors:    the names of the checkpoint tensors it is made of
    read:       reads the tensors and returns the weight, on the CPU; a plain tensor if it is not quantized
    read_input: reads how the layer's input is quantized as well; None if it stays as it is
    shared:     tensors of the weight that must be equal, bit for bit, in all weights merged along N
    stored_as:  the format's name in `inspect`, if it differs from the spec's own name
    check:      reads the weight's small tensors that say how the large ones lie, and raises UserError if they
                contradict them; None if there are none
    """

    module: str
    shape: tuple[int, int]
    spec: WeightFormat
    tensors: tuple[str, ...]
    read: Callable[[], Weight | Tensor]
    read_input: Callable[[], InputFormat] | None = None
    shared: tuple[str, ...] = ()
    stored_as: str | None = None
    check: Callable[[], None] | None = None

    @property
    def is_quantized(self) -> bool:
        """Say whether a layout can pack the weight; otherwise `read` gives an ordinary tensor."""
        return not isinstance(self.spec, Unquantized)

    def problem(self, dtype: torch.dtype, device: torch.device) -> Problem:
        n, k = self.shape
        return Problem(self.spec, n, k, dtype, device)


class Convention(Protocol):
    """One way of writing quantized weights into a checkpoint."""

    @property
    def name(self) -> str: ...

    @property
    def reads(self) -> str:
        """Return the form that the convention reads, in a few words for an error."""
        ...

    def recognizes(self, checkpoint: Checkpoint) -> bool:
        """Say whether the checkpoint declares this convention; nothing else is checked."""
        ...

    def modules(self, checkpoint: Checkpoint) -> dict[str, StoredWeight]:
        """Return every quantized linear weight by its module's name in the checkpoint.

        Raises UserError if the scheme is not one that Scalegate reads, or the config and the tensors
        disagree.
        """
        ...

    def claims(self, checkpoint: Checkpoint, module: str) -> bool:
        """Say whether the config declares this linear module quantized, by its name in the checkpoint."""
        ...


@runtime_checkable
class ExcludingConvention(Protocol):
    """A convention whose config names modules that are not quantized."""

    def excludes(self, checkpoint: Checkpoint, module: str) -> str | None:
        """Return the config's pattern that excludes `module`, by its stored name; None if there is none."""
        ...


class ExportConvention(Convention, Protocol):
    """A convention that an artifact can be written in."""

    def refuses(self, spec: WeightFormat, module: str, is_embedding: bool = False) -> str | None:
        """Return None if `module` can be written in `spec`, otherwise the reason and a remedy."""
        ...

    def tensors(self, module: str, weight: Weight, inputs: InputFormat | None = None) -> dict[str, Tensor]:
        """Return the checkpoint tensors that store `<module>.weight`, by full name.

        inputs: how the layer's input is rounded, if the weight's spec quantizes activations
        """
        ...

    def quantization_config(
        self, specs: Mapping[str, WeightFormat], ignore: Sequence[str], embeddings: Sequence[str] = ()
    ) -> dict[str, Any]:
        """Return the `quantization_config` for `config.json`: `specs` holds the format of every quantized
        module.

        `ignore` names the linear layers that stay unquantized, `embeddings` the modules that are not linear.
        """
        ...

    def file_metadata(
        self,
        specs: Mapping[str, WeightFormat],
        shapes: Mapping[str, tuple[int, int]],
        plain: Sequence[str],
    ) -> dict[str, str]:
        """Return the safetensors header metadata that every file of the checkpoint carries.

        specs and shapes: the format and (N, K) of each quantized module; plain: names of all other tensors.
        """
        ...

    def sidecars(self, config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Return further JSON files beside `config.json`, by name; `config` is the `quantization_config` in
        it.
        """
        ...

    def bits_per_weight(self, spec: WeightFormat, n: int, k: int) -> float:
        """Return the bits per weight in this convention: the spec's own bits, unless the convention stores
        more than the format needs.
        """
        ...


class ExportDefaults:
    """The defaults for export conventions whose files hold the tensors of a format and nothing else."""

    def file_metadata(
        self,
        specs: Mapping[str, WeightFormat],
        shapes: Mapping[str, tuple[int, int]],
        plain: Sequence[str],
    ) -> dict[str, str]:
        return {"format": "pt"}

    def sidecars(self, config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        return {}

    def bits_per_weight(self, spec: WeightFormat, n: int, k: int) -> float:
        return spec.bits_per_weight(n, k)


@runtime_checkable
class StackingConvention(Protocol):
    """An export convention that stores the experts of a layer in one tensor, as the model has them."""

    def refuses_model(self, model_type: str) -> str | None:
        """Return None if the convention is read for this architecture, otherwise the reason and a remedy."""
        ...

    def stacked(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the checkpoint tensors that store all experts of one tensor of the source.

        tensors: what `tensors` has returned for each of the experts' weights, in order
        """
        ...


@runtime_checkable
class KVCacheConvention(Protocol):
    """An export convention that has a place for how keys and values are stored."""

    def kv_cache(self, kv_format: str) -> dict[str, Any] | None:
        """Return the entries of `quantization_config` for a KV format; None for a format that the convention
        does not know.
        """
        ...

    def kv_scale_names(self, attention: str) -> tuple[str, str]:
        """Return the fp32 tensors that an attention module's keys and values are multiplied by when read."""
        ...


def kv_declaration(convention: ExportConvention, kv_format: str) -> dict[str, Any] | None:
    """Return how `convention` declares `kv_format`; None if it cannot."""
    return convention.kv_cache(kv_format) if isinstance(convention, KVCacheConvention) else None


def kv_scale_names(convention: ExportConvention, attention: str) -> tuple[str, str]:
    """Return the names of an attention module's scales in the checkpoint; by default those of
    compressed-tensors.
    """
    if isinstance(convention, KVCacheConvention):
        return convention.kv_scale_names(attention)
    return f"{attention}.k_scale", f"{attention}.v_scale"


CONVENTIONS: Registry[Convention] = Registry("convention")
EXPORTS: Registry[ExportConvention] = Registry("export convention")
