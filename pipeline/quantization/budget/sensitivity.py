"""How much each group of a model's linear layers costs in each format: measured, one group at a time.

A group's cost is the divergence of the model's predictions while the rest of the model stays unquantized. All
variants go through the decoder together, so that each layer is read only once; if there are many, their
hidden states are spilled to a file. `allocation.py` chooses.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ....base.progress import progress_bar
from ....layouts.formats.int4 import Int4
from ....layouts.formats.int8 import Int8
from ....layouts.formats.weight_format import Weight, WeightFormat, spec_from_json, spec_to_json
from ...checkpoints.checkpoint import Checkpoint
from ...conventions.convention import ExportConvention
from ...model_loader.hidden_states import StatesPart
from ...model_loader.layer_stream import LayerStream
from ...model_loader.linear_weights import LINEAR, LinearWeight
from ...model_loader.weight_places import Places, kind_of, serve
from ..shards.shared_tensors import merged_under, shared_in
from ..shards.tasks import WeightTask
from ..shards.weight_tensors import WeightQuantizer

GROUP_SIZES = (128, 64, 32)
DIGITS = 6
TEXT_SEQUENCES = 8
"""How many sequences are read: formats are compared token by token, so a few sequences suffice."""

Divergences = dict[str, dict[WeightFormat, float]]
"""The mean KL in nats of each group in each format."""


@dataclass(frozen=True)
class Group:
    """Linear weights that must be of one format: merged siblings, or all experts of a layer.

    divergence: mean KL in nats over the text, by format, with this group alone in that format
    """

    modules: tuple[str, ...]
    shapes: tuple[tuple[int, int], ...]
    divergence: Mapping[WeightFormat, float]

    @property
    def weights(self) -> int:
        return sum(n * k for n, k in self.shapes)

    def to_json(self) -> dict[str, Any]:
        formats = [{"spec": spec_to_json(spec), "kl": value} for spec, value in self.divergence.items()]
        return {"modules": list(self.modules), "shapes": list(map(list, self.shapes)), "formats": formats}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Group":
        """Inverse of `to_json`. Any other value raises KeyError, TypeError or ValueError."""
        shapes = tuple((int(n), int(k)) for n, k in value["shapes"])
        divergence = {spec_from_json(entry["spec"]): float(entry["kl"]) for entry in value["formats"]}
        return cls(tuple(map(str, value["modules"])), shapes, divergence)


def candidates(spec: WeightFormat) -> list[WeightFormat]:
    """Return the formats to choose from if the recipe says `spec`: INT4 in groups that engines read, or INT8.

    INT8 is not mixed with fractional zero points, which only torchao's convention stores. INT8 is not offered
    with NVFP4 either: compressed-tensors can hold such a mixture, but no engine that we tried serves it.
    """
    if not isinstance(spec, Int4):
        return [spec]
    sizes: list[WeightFormat] = [Int4(size, spec.symmetric, spec.zero_point) for size in GROUP_SIZES]
    return [*sizes, Int8()] if spec.has_integer_zero else sizes


def _takes(linear: LinearWeight, spec: WeightFormat, convention: ExportConvention) -> bool:
    """Say whether the weight can be stored and served in `spec`."""
    # Experts have no INT8 layout but the one that dequantizes them all for every product.
    served = not isinstance(spec, Int8) or kind_of(linear.module) == linear.module
    fits = spec.refuses(linear.n, linear.k) is None
    return served and fits and convention.refuses(spec, linear.module) is None


def weights_to_choose_for(tasks: Sequence[WeightTask]) -> dict[str, LinearWeight]:
    """Return the quantized linear weights that may get another format, by module."""
    linears = [task.linear for task in tasks if task.linear is not None and task.is_quantized]
    return {linear.module: linear for linear in linears if linear.role == LINEAR}


def measure_sensitivity(
    checkpoint: Checkpoint,
    tasks: Sequence[WeightTask],
    sequences: Tensor,
    quantizer: WeightQuantizer,
    convention: ExportConvention,
    spill: Path | None,
    progress: bool,
    fixed: Collection[str] = (),
) -> list[Group]:
    """Return the groups of the quantized layers among `tasks`, with the divergence of each in each of its
    formats.

    sequences:  int64 [S, T]; the first 8 are read
    convention: must be able to store every format that is measured
    fixed:      modules whose groups are left out
    Weights are rounded without a text here: a text improves all of them by about the same share.
    """
    linears = weights_to_choose_for(tasks)
    leaders = merged_under(checkpoint, list(linears.values()))
    grouped = _grouped(leaders, fixed)
    specs = {task.linear.module: task.spec for task in tasks if task.linear is not None}
    formats = {
        group: [
            spec
            for spec in candidates(specs[modules[0]])
            if all(_takes(linears[module], spec, convention) for module in modules)
        ]
        for group, modules in grouped.items()
    }
    with torch.no_grad():
        stream = LayerStream(checkpoint, sequences[:TEXT_SEQUENCES], quantizer.device, spill)
        places = Places(stream.assignments, list(linears.values()))
        measurement = _Measurement(stream, places, quantizer, leaders, grouped)
        divergence = measurement.run(formats, progress)
    return [
        Group(
            tuple(modules),
            tuple((linears[module].n, linears[module].k) for module in modules),
            divergence[group],
        )
        for group, modules in grouped.items()
        if divergence[group]
    ]


def _grouped(leaders: Mapping[str, str], fixed: Collection[str]) -> dict[str, list[str]]:
    """Return modules that must have one format, by the group's name; groups with a `fixed` module are left
    out.
    """
    grouped: dict[str, list[str]] = defaultdict(list)
    for module, leader in leaders.items():
        grouped[kind_of(leader)].append(module)
    return {group: modules for group, modules in grouped.items() if set(fixed).isdisjoint(modules)}


@dataclass(frozen=True)
class _Variant:
    """The model with one group in one format, and its hidden states behind the last layer that was run."""

    group: str
    spec: WeightFormat
    states: StatesPart


@dataclass(frozen=True)
class _Measurement:
    """The pass over the decoder in which all variants advance together, one layer at a time.

    leaders: as `merged_under` finds them
    grouped: the modules of each group
    """

    stream: LayerStream
    places: Places
    quantizer: WeightQuantizer
    leaders: Mapping[str, str]
    grouped: Mapping[str, list[str]]

    def run(self, formats: Mapping[str, list[WeightFormat]], progress: bool) -> Divergences:
        """Return the divergence of each group in each of its `formats`."""
        begun = {layer: self._begun_in(layer, formats) for layer in self.stream.layers}
        # A variant goes through each layer from the one where it begins, and through the output projection.
        to_go = range(len(begun) + 1, 1, -1)
        passes = sum(len(new) * left for new, left in zip(begun.values(), to_go, strict=True))
        passes += len(begun) + 1
        room = iter(self.stream.variants(sum(map(len, begun.values()))))
        variants: list[_Variant] = []
        with progress_bar(total=passes, desc="sensitivity", unit=" passes", shown=progress) as bar:
            for layer, new in begun.items():
                self.stream.place(layer)
                for variant in variants:
                    self.stream.carry(layer, variant.states, variant.states)
                    bar.update()
                for group, spec in new:
                    variants.append(self._begin(layer, group, spec, next(room)))
                    bar.update()
                self.stream.place(layer)
                self.stream.advance(layer)
                self.stream.drop(layer)
                bar.update()
            values = _divergences(self.stream, [variant.states for variant in variants], bar.update)
        divergence: Divergences = defaultdict(dict)
        for variant, value in zip(variants, values, strict=True):
            divergence[variant.group][variant.spec] = value
        return divergence

    def _begun_in(
        self, layer: str, formats: Mapping[str, list[WeightFormat]]
    ) -> list[tuple[str, WeightFormat]]:
        """Return the variants that differ from the model from this layer on."""
        here = set(self.places.of_layer(layer))
        return [
            (group, spec)
            for group, modules in self.grouped.items()
            if here.issuperset(modules)
            for spec in formats[group]
        ]

    def _begin(self, layer: str, group: str, spec: WeightFormat, states: StatesPart) -> _Variant:
        """Run `layer` with the group's weights rounded to `spec`, from the model's own states to `states`."""
        checkpoint = self.stream.checkpoint
        linears = [self.places.linears[module] for module in self.grouped[group]]
        shared = shared_in(checkpoint, linears, self.leaders, spec, self.quantizer)
        rounded: dict[str, Weight] = {
            linear.module: self.quantizer.quantize(
                checkpoint, linear, spec, shared.get(linear.module, {})
            ).weight
            for linear in linears
        }
        with serve(self.stream, rounded, self.places):
            self.stream.place(layer)
            self.stream.carry(layer, None, states)
        return _Variant(group, spec, states)


def _divergences(
    stream: LayerStream, variants: Sequence[StatesPart], seen: Callable[[], object]
) -> list[float]:
    """Return the mean KL of each variant's predictions from the model's own, in nats; a few sequences at a
    time.

    seen: called when the model's own predictions are known, and each variant's
    """
    totals, tokens = [0.0] * len(variants), 0
    outputs = [stream.outputs(states) for states in variants]
    for start, hidden in zip(stream.starts(), stream.outputs(), strict=True):
        is_last = start == stream.starts()[-1]
        log_p = stream.predictions(hidden).float().log_softmax(-1)
        tokens += log_p.shape[0] * log_p.shape[1]
        for index, own in enumerate(outputs):
            totals[index] += _divergence(stream, next(own), log_p)
            if is_last:
                seen()
    seen()
    return [float(f"{total / tokens:.{DIGITS}g}") for total in totals]


def _divergence(stream: LayerStream, hidden: Tensor, log_p: Tensor) -> float:
    """Return the KL of the predictions from `log_p`, log probabilities [n, T, vocab], over all tokens; in
    nats.
    """
    log_q = stream.predictions(hidden).float().log_softmax(-1)
    return float((log_p.exp() * (log_p - log_q)).sum(dtype=torch.float64))
