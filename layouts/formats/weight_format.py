"""What a weight format is: a spec with its parameters, and a weight with its tensors. No kernels.

There is one file in this folder for each format; `all_formats.py` registers the formats. This file has the
contract, and the slicing and merging of weights, which are the same for every format.

A format is two dataclasses. A format's *spec* (`Int4(group_size=128)`) is hashable and holds the parameters
that a recipe may set. A format's *weight* holds the tensors of one linear layer; `dequantize()` defines what
the tensors mean.
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Protocol, Self, TypeVar

import torch
from torch import Tensor

from ...base.registry import Registry


class WeightFormat(Hashable, Protocol):
    """A spec: one format with its parameters, which are the fields of a frozen dataclass.

    Parameters are numbers, strings or flags with defaults, so that a recipe can set them by name and JSON can
    hold them. `__post_init__` raises ValueError for an illegal parameter.
    """

    name: ClassVar[str]
    """The format's name in recipes, plans and manifests."""

    @property
    def shared(self) -> tuple[str, ...]:
        """Tensors of a weight that all rows share: weights merge along N only if these tensors are equal."""
        ...

    @property
    def label(self) -> str:
        """The format's name that people read, with all parameters: `INT4 g128, zero points`."""
        ...

    @property
    def key(self) -> str:
        """A few words that identify the spec: `int4 g128 zp`."""
        ...

    @property
    def column_multiple(self) -> int:
        """K must be a multiple of this number."""
        ...

    @property
    def weight_class(self) -> "type[Weight]":
        """The class of the format's weights."""
        ...

    def refuses(self, n: int, k: int) -> str | None:
        """Return None if a weight [n, k] can have this format, otherwise the reason in a few words."""
        ...

    def nearest(self, n: int, k: int) -> "WeightFormat | None":
        """Return the spec that a weight [n, k] gets if it cannot have this one: of the same format, or of one
        that stands in for it; None if there is none."""
        ...

    def beside_experts(self) -> "WeightFormat":
        """Return the spec of the same format that other readers support in a model with quantized experts."""
        ...

    def bits_per_weight(self, n: int, k: int) -> float:
        """Return the bits per weight of an [n, k] weight, scales and zero points included."""
        ...

    def nbytes(self, n: int, k: int) -> int:
        """Return about how many bytes a weight [n, k] takes in a checkpoint, for dividing a checkpoint into
        files.
        """
        ...

    def random(self, n: int, k: int, device: torch.device) -> "Weight":
        """Make a weight for timing: uniform codes, values about as large as those of a trained weight."""
        ...

    @classmethod
    def variants(cls) -> "Sequence[WeightFormat]":
        """Return the commonly released specs, which `doctor` asks layouts about."""
        ...


@dataclass(frozen=True)
class Weight(ABC):
    """The base of weights: a linear layer's weight [N, K] in a format's own numbers.

    A subclass adds the tensors. Each tensor has N rows, and its columns are one or proportional to K, except
    for the tensors named in the spec's `shared`, which belong to the whole weight. The functions of this file
    rely on the sizes of the tensors to slice and merge weights of any format.
    """

    spec: Any
    """The WeightFormat."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """(N, K) of the dequantized weight."""

    @abstractmethod
    def dequantize(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Return the weight [N, K] in `dtype`, computed in fp32 and rounded once. This defines the format."""

    def tensors(self) -> dict[str, Tensor]:
        """Return the weight's tensors by name."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "spec"}

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> Self:
        """Return a weight of the same spec with the given tensors."""
        return replace(self, **tensors)

    def to(self, device: torch.device | str) -> Self:
        return self.with_tensors({name: tensor.to(device) for name, tensor in self.tensors().items()})

    def rows(self, start: int, stop: int) -> Self:
        """Return rows `start:stop`, a slice along N."""
        shared = self.spec.shared
        return self.with_tensors(
            {name: t if name in shared else t[start:stop] for name, t in self.tensors().items()}
        )


AnyWeight = TypeVar("AnyWeight", bound=Weight)


def merge_rows(weights: Sequence[AnyWeight]) -> AnyWeight | None:
    """Return one weight with all rows of the given weights in order; None if their specs or shared tensors
    differ."""
    first = weights[0]
    if any(weight.spec != first.spec or weight.shape[1] != first.shape[1] for weight in weights):
        return None
    parts = [weight.tensors() for weight in weights]
    for name in first.spec.shared:
        if not all(torch.equal(part[name], parts[0][name]) for part in parts):
            return None
    if len({tuple(t.dtype for t in part.values()) for part in parts}) > 1:
        return None
    merged = {
        name: torch.cat([part[name] for part in parts]) for name in parts[0] if name not in first.spec.shared
    }
    return first.with_tensors(merged)


def rows_by_turns(weight: AnyWeight, parts: int) -> AnyWeight:
    """Interleave the rows of the `parts` equally large weights that lie one after another in `weight`."""

    def reordered(tensor: Tensor) -> Tensor:
        return tensor.unflatten(0, (parts, -1)).transpose(0, 1).flatten(0, 1).contiguous()

    shared = weight.spec.shared
    return weight.with_tensors(
        {name: t if name in shared else reordered(t) for name, t in weight.tensors().items()}
    )


def weight_of(spec: WeightFormat, tensors: Mapping[str, Tensor]) -> Weight:
    """Return the weight with these tensors, as the inverse of `Weight.tensors`."""
    return spec.weight_class(spec, **tensors)


def rows_together(spec: Any) -> int:
    """Return how many consecutive rows share scales in a weight of `spec`; so many rows are quantized at a
    time.
    """
    return getattr(spec, "rows_together", 1)


WEIGHT_FORMATS: Registry[type[WeightFormat]] = Registry("weight format")


def parameter_names(cls: type[WeightFormat]) -> list[str]:
    """Return the parameters of a format that a recipe may set."""
    return [field.name for field in fields(cls)]  # type: ignore[arg-type]


def parameters(spec: WeightFormat) -> dict[str, Any]:
    """Return a spec's parameters by name, as a recipe sets them."""
    return {field.name: getattr(spec, field.name) for field in fields(spec)}  # type: ignore[arg-type]


def spec_to_json(spec: WeightFormat) -> dict[str, Any]:
    """Return the spec as JSON, like `{"format": "int4", "group_size": 128, ...}`."""
    return {"format": spec.name} | parameters(spec)


def spec_from_json(value: Mapping[str, Any]) -> WeightFormat:
    """Inverse of `spec_to_json`. An unknown format raises UserError, illegal parameters ValueError."""
    given = dict(value)
    cls = WEIGHT_FORMATS[given.pop("format")]
    try:
        return cls(**given)
    except TypeError as error:
        raise ValueError(f"{cls.name}: {error}") from error
