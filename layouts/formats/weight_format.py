"""The weight-format seam: a frozen spec that says all there is to know of a format without a kernel.

One file in this folder for each format; `all_formats.py` registers them. This file is the contract, and the
slicing and merging that every format gets from it.

A format is two dataclasses. Its *spec* (`Int4(group_size=128)`) is hashable and holds the parameters that a
recipe may set. Its *weight* holds the tensors of one linear layer; `dequantize()` is the definition of truth.
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Protocol, Self, TypeVar

import torch
from torch import Tensor

from ...base.registry import Registry


class WeightFormat(Hashable, Protocol):
    """A spec: one format with its parameters. A frozen dataclass whose fields are the parameters.

    Parameters are plain values (numbers, strings, flags) with defaults, so that a recipe can set them by name
    and JSON can hold them. `__post_init__` raises ValueError for one that is not legal.
    """

    name: ClassVar[str]
    """As recipes, plans and manifests call the format."""
    shared: ClassVar[tuple[str, ...]]
    """Tensors of its weight that stand for all rows: they must be equal where weights are merged along N."""

    @property
    def label(self) -> str:
        """For people, parameters included: `INT4 g128, zero points`."""
        ...

    @property
    def key(self) -> str:
        """One word or a few that tell this spec from every other: `int4 g128 zp`."""
        ...

    @property
    def column_multiple(self) -> int:
        """K must be a multiple of this."""
        ...

    @property
    def weight_class(self) -> "type[Weight]":
        """Of its weights."""
        ...

    def refuses(self, n: int, k: int) -> str | None:
        """None where a weight [n, k] can have this format, otherwise the reason in a few words."""
        ...

    def nearest(self, n: int, k: int) -> "WeightFormat | None":
        """The same format with other parameters that takes [n, k]; None where there is none."""
        ...

    def bits_per_weight(self, n: int, k: int) -> float:
        """What a weight [n, k] takes, scales and zero points included, in bits for each of its numbers."""
        ...

    def nbytes(self, n: int, k: int) -> int:
        """About what a weight [n, k] takes in a checkpoint, in bytes: files are divided by it."""
        ...

    def random(self, n: int, k: int, device: torch.device) -> "Weight":
        """A weight for measuring: codes uniform, values of about the size that a trained weight has."""
        ...

    @classmethod
    def variants(cls) -> "Sequence[WeightFormat]":
        """The specs that `doctor` asks layouts about: what is commonly released."""
        ...


@dataclass(frozen=True)
class Weight(ABC):
    """A linear layer's weight [N, K] in a format's own numbers.

    A subclass adds the tensors. Each has N rows, and one column for all of a row or a number that is in
    proportion to K, but for those that its spec names in `shared`, which stand for all of the weight. That is
    what lets the functions here slice and merge a weight of any format.
    """

    spec: Any
    """The WeightFormat."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """(N, K) of the weight it stands for."""

    @abstractmethod
    def dequantize(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """The weight [N, K] in `dtype`, computed in fp32 and rounded once: the definition of truth."""

    def tensors(self) -> dict[str, Tensor]:
        """What it holds, by name."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "spec"}

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> Self:
        """The same format with other numbers."""
        return replace(self, **tensors)

    def to(self, device: torch.device | str) -> Self:
        return self.with_tensors({name: tensor.to(device) for name, tensor in self.tensors().items()})

    def rows(self, start: int, stop: int) -> Self:
        """Rows `start:stop`: a slice along N, as experts and column-parallel layers want it."""
        shared = self.spec.shared
        return self.with_tensors(
            {name: t if name in shared else t[start:stop] for name, t in self.tensors().items()}
        )


AnyWeight = TypeVar("AnyWeight", bound=Weight)


def merge_rows(weights: Sequence[AnyWeight]) -> AnyWeight | None:
    """One weight with the rows of all, one after another; None where their specs or shared tensors differ."""
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


def weight_of(spec: WeightFormat, tensors: Mapping[str, Tensor]) -> Weight:
    """The weight with these tensors; undoes `Weight.tensors`."""
    return spec.weight_class(spec, **tensors)


WEIGHT_FORMATS: Registry[type[WeightFormat]] = Registry("weight format")


def parameter_names(cls: type[WeightFormat]) -> list[str]:
    """What a recipe may set of a format."""
    return [field.name for field in fields(cls)]  # type: ignore[arg-type]


def parameters(spec: WeightFormat) -> dict[str, Any]:
    """A spec's parameters by name, as a recipe sets them."""
    return {field.name: getattr(spec, field.name) for field in fields(spec)}  # type: ignore[arg-type]


def spec_to_json(spec: WeightFormat) -> dict[str, Any]:
    """`{"format": "int4", "group_size": 128, ...}`."""
    return {"format": spec.name} | parameters(spec)


def spec_from_json(value: Mapping[str, Any]) -> WeightFormat:
    """Undoes `spec_to_json`. Raises UserError for an unknown format, ValueError for what it cannot have."""
    given = dict(value)
    cls = WEIGHT_FORMATS[given.pop("format")]
    try:
        return cls(**given)
    except TypeError as error:
        raise ValueError(f"{cls.name}: {error}") from error
