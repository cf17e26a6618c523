"""What each group of a model's linear layers costs in each format: measured, one group at a time.

The rest of the model stays as it is, and what is measured is the divergence of its predictions. All variants
go through the decoder together, so every layer is read once, whatever their number; their hidden states are
spilled to a file where they are many. `allocation.py` chooses.
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
"""Of the calibration text: differences between formats are paired, token by token, so few show them."""


@dataclass(frozen=True)
class Group:
    """Linear weights that have to be of one format: merged siblings, or all experts of a layer.

    divergence: mean KL in nats over the text, by format, with this group alone in it; 0 where it stays plain
    """

    modules: tuple[str, ...]
    shapes: tuple[tuple[int, int], ...]
    divergence: Mapping[WeightFormat, float]

    @property
    def weights(self) -> int:
        return sum(n * k for n, k in self.shapes)

    def to_json(self) -> dict[str, Any]:
        found = [{"spec": spec_to_json(spec), "kl": value} for spec, value in self.divergence.items()]
        return {"modules": list(self.modules), "shapes": [list(one) for one in self.shapes], "formats": found}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Group":
        """Undoes `to_json`. Raises KeyError, TypeError or ValueError for what is none."""
        shapes = tuple((int(n), int(k)) for n, k in value["shapes"])
        found = {spec_from_json(one["spec"]): float(one["kl"]) for one in value["formats"]}
        return cls(tuple(map(str, value["modules"])), shapes, found)


def candidates(spec: WeightFormat) -> list[WeightFormat]:
    """What a weight of a recipe for `spec` may be instead: INT4 in groups that engines read, or INT8.

    Beside fractional zero points there is no INT8, since only torchao's convention stores those. Nor beside
    NVFP4: compressed-tensors can hold such a mixture, but no engine was seen here that serves it.
    """
    if not isinstance(spec, Int4):
        return [spec]
    sizes: list[WeightFormat] = [Int4(size, spec.symmetric, spec.zero_point) for size in GROUP_SIZES]
    return [*sizes, Int8()] if spec.has_integer_zero else sizes


def _takes(linear: LinearWeight, spec: WeightFormat, convention: ExportConvention) -> bool:
    """Whether the weight can be of `spec`, stored and served."""
    # Experts have no INT8 layout but the one that dequantizes them all for every product.
    served = not isinstance(spec, Int8) or kind_of(linear.module) == linear.module
    fits = spec.refuses(linear.n, linear.k) is None
    return served and fits and convention.refuses(spec, linear.module) is None


def weights_to_choose_for(tasks: Sequence[WeightTask]) -> dict[str, LinearWeight]:
    """By module, the linear weights that are quantized and may get another format."""
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
    """The groups of the quantized layers among `tasks`, with what each costs in each of its formats.

    sequences:  int64 [S, T]; the first 8 are read
    convention: which has to be able to store what is measured
    fixed:      modules whose groups are left out
    Weights are rounded without a text here: what a text gains is about the same share everywhere.
    """
    linears = weights_to_choose_for(tasks)
    specs = {task.linear.module: task.spec for task in tasks if task.linear is not None}
    grouped: dict[str, list[str]] = defaultdict(list)
    leaders = merged_under(checkpoint, list(linears.values()))
    for module, leader in leaders.items():
        grouped[kind_of(leader)].append(module)
    for group in [group for group, modules in grouped.items() if not set(fixed).isdisjoint(modules)]:
        del grouped[group]
    variants: list[tuple[str, WeightFormat, StatesPart]] = []
    with torch.no_grad():
        stream = LayerStream(checkpoint, sequences[:TEXT_SEQUENCES], quantizer.device, spill)
        places = Places(stream.assignments, list(linears.values()))
        begun: dict[str, list[tuple[str, WeightFormat]]] = {}
        for name in stream.layers:
            here = set(places.of_layer(name))
            begun[name] = [
                (group, spec)
                for group, modules in grouped.items()
                if here.issuperset(modules)
                for spec in candidates(specs[modules[0]])
                if all(_takes(linears[one], spec, convention) for one in modules)
            ]
        # Through each layer from the one where it begins, and through the output projection.
        to_go = range(len(begun) + 1, 1, -1)
        passes = sum(len(new) * left for new, left in zip(begun.values(), to_go, strict=True))
        passes += len(begun) + 1
        room = iter(stream.variants(sum(map(len, begun.values()))))
        with progress_bar(total=passes, desc="sensitivity", unit=" passes", shown=progress) as bar:
            for name, new in begun.items():
                stream.place(name)
                for _, _, states in variants:
                    stream.carry(name, states, states)
                    bar.update()
                for group, spec in new:
                    together = [linears[one] for one in grouped[group]]
                    shared = shared_in(checkpoint, together, leaders, spec, quantizer)
                    rounded: dict[str, Weight] = {
                        one.module: quantizer.quantize(
                            checkpoint, one, spec, shared.get(one.module, {})
                        ).weight
                        for one in together
                    }
                    with serve(stream, rounded, places):
                        stream.place(name)
                        states = next(room)
                        stream.carry(name, None, states)
                        variants.append((group, spec, states))
                    bar.update()
                stream.place(name)
                stream.advance(name)
                stream.drop(name)
                bar.update()
            divergences = _divergences(stream, [states for _, _, states in variants], bar.update)
    found: dict[str, dict[WeightFormat, float]] = defaultdict(dict)
    for (group, spec, _), value in zip(variants, divergences, strict=True):
        found[group][spec] = value
    return [
        Group(tuple(modules), tuple((linears[one].n, linears[one].k) for one in modules), found[group])
        for group, modules in grouped.items()
        if found[group]
    ]


def _divergences(
    stream: LayerStream, variants: Sequence[StatesPart], seen: Callable[[], object]
) -> list[float]:
    """Mean KL of each variant's predictions from the model's own, in nats; a few sequences at a time.

    seen: called when the model's own are known, and each variant's
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
    """KL of the predictions from `log_p`, log probabilities [n, T, vocab], over all tokens; in nats."""
    log_q = stream.predictions(hidden).float().log_softmax(-1)
    return float((log_p.exp() * (log_p - log_q)).sum(dtype=torch.float64))
