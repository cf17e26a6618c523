"""Whether what was loaded is what the config declares and what the baseline is a baseline of.

A checkpoint whose tensors contradict its config is refused before any check, with the loader's own message.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..verdict import CheckResult

NAME = "loads"
SHOWN = 3


@dataclass(frozen=True)
class Loaded:
    """One side as it came out of the loader."""

    linear_shapes: Mapping[str, tuple[int, int]]
    """[N, K] of every linear layer, by module name."""
    vocab_size: int
    layouts: Mapping[str, str] = field(default_factory=dict)
    """The layout of every quantized layer, by module name."""


def check_loads(artifact: Loaded, baseline: Loaded) -> CheckResult:
    """Same layers, shapes and vocabulary as the baseline; anything else is another model."""
    problems = []
    if artifact.vocab_size != baseline.vocab_size:
        problems.append(
            f"vocabulary of {artifact.vocab_size} tokens, the baseline's has {baseline.vocab_size}"
        )
    for what, names in (
        ("absent here", baseline.linear_shapes.keys() - artifact.linear_shapes.keys()),
        ("absent from the baseline", artifact.linear_shapes.keys() - baseline.linear_shapes.keys()),
        ("of another shape than the baseline's", _reshaped(artifact, baseline)),
    ):
        if names:
            problems.append(f"{len(names)} linear layers {what}: {', '.join(sorted(names)[:SHOWN])}")
    layouts = ", ".join(f"{count} in {name}" for name, count in Counter(artifact.layouts.values()).items())
    return CheckResult(
        name=NAME,
        status="fail" if problems else "pass",
        measured=f"{len(artifact.layouts)} of {len(artifact.linear_shapes)} linear layers quantized"
        + (f" ({layouts})" if layouts else ""),
        bound="the layers, shapes and vocabulary of the baseline",
        reason="; ".join(problems)
        or "config and tensors agree, and every layer the config declares is quantized",
        figures={"linear_layers": len(artifact.linear_shapes), "quantized_layers": len(artifact.layouts)},
    )


def _reshaped(artifact: Loaded, baseline: Loaded) -> set[str]:
    return {
        name
        for name, shape in artifact.linear_shapes.items()
        if baseline.linear_shapes.get(name, shape) != shape
    }
