"""Whether the artifact loads as the baseline's model, layer by layer, and is served in the same layouts.

A checkpoint whose tensors contradict its config is refused before any check, with the loader's own message.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping

from ...layouts.modules.merged_linear import layers_of
from ..adapters.prometheus_text import labelled
from ..adapters.series import SCALEGATE_SERIES, Series
from ..evidence.evidence import ModelFigures, PackedLayers
from ..evidence.verdict import CheckResult

NAME = "loads"
SHOWN = 3


def packed_layers(samples: Mapping[str, float], series: Series = SCALEGATE_SERIES) -> PackedLayers:
    """Return the layers that a server has packed, as its `/metrics` say."""
    said = labelled(samples, series.packed_layers)
    if not said:
        return None
    return {f"{labels['layout']} {labels['shape']}": int(count) for labels, count in said if count}


def packed_on(samples: Mapping[str, float], series: Series = SCALEGATE_SERIES) -> str | None:
    """Return the model of device that a server packed its layers for, if it says so."""
    return next((labels.get("device") or None for labels, _ in labelled(samples, series.packed_layers)), None)


def weights_in(packed: Mapping[str, int]) -> int:
    """Return the number of weights in packed layers: the number does not depend on how layers are merged or
    where they are packed.
    """
    return sum(
        count * math.prod(map(int, re.findall(r"\d+", name.split()[1]))) for name, count in packed.items()
    )


def check_loads(
    artifact: ModelFigures,
    baseline: ModelFigures,
    served: PackedLayers = None,
    baseline_served: PackedLayers = None,
) -> CheckResult:
    """Fail if layers, shapes or vocabulary differ from the baseline's, or if the servers packed the layers in
    other layouts than this process did."""
    problems = []
    for side, loaded, there in (("artifact", artifact, served), ("baseline", baseline, baseline_served)):
        if loaded.packed is not None and there is not None and dict(there) != dict(loaded.packed):
            problems.append(
                f"the {side}'s server packed its layers as {_listed(there)}, this process as "
                f"{_listed(loaded.packed)}: the verdict would describe layouts that are not served"
            )
        weights = None if there is None else weights_in(there)
        if loaded.packed_weights is not None and weights not in (None, loaded.packed_weights):
            problems.append(
                f"the {side}'s server holds {weights} quantized weights, the checkpoint "
                f"{loaded.packed_weights}: it serves another checkpoint"
            )
    if artifact.vocab_size != baseline.vocab_size:
        problems.append(
            f"vocabulary of {artifact.vocab_size} tokens, the baseline's has {baseline.vocab_size}"
        )
    for what, names in (
        ("missing from the artifact", baseline.linear_shapes.keys() - artifact.linear_shapes.keys()),
        ("missing from the baseline", artifact.linear_shapes.keys() - baseline.linear_shapes.keys()),
        ("with another shape than the baseline's", _reshaped(artifact, baseline)),
    ):
        if names:
            problems.append(f"{len(names)} linear layers {what}: {', '.join(sorted(names)[:SHOWN])}")
    layouts = ", ".join(f"{count} in {name}" for name, count in Counter(artifact.layouts.values()).items())
    quantized = sum(layers_of(name) for name in artifact.layouts)
    return CheckResult(
        name=NAME,
        status="fail" if problems else "pass",
        measured=f"{quantized} of {len(artifact.linear_shapes)} linear layers quantized"
        + (f" (products: {layouts})" if layouts and artifact.packed is not None else ""),
        bound="the layers, shapes and vocabulary of the baseline",
        reason="; ".join(problems)
        or "config and tensors agree, and every layer the config declares is quantized",
        figures={"linear_layers": len(artifact.linear_shapes), "quantized_layers": quantized},
    )


def _listed(packed: Mapping[str, int]) -> str:
    return ", ".join(f"{count} in {name}" for name, count in sorted(packed.items())) or "none"


def _reshaped(artifact: ModelFigures, baseline: ModelFigures) -> set[str]:
    return {
        name
        for name, shape in artifact.linear_shapes.items()
        if baseline.linear_shapes.get(name, shape) != shape
    }
