"""The figures behind the page's curves: every block of every M, each side's repeats in the order they ran.

Plain data for `curves.js`, which draws them; made from the verdict alone.
"""

from collections.abc import Callable
from statistics import median
from typing import Any

from ...serving_check.evidence.measurement import Block, Repeat
from ...serving_check.evidence.verdict import Verdict
from .names import ARTIFACT_COLOUR, BASELINE_COLOUR, FLOOR_COLOUR, RIVAL_COLOUR

DIGITS = 5
"""Significant ones: more are not seen."""
FIGURES: dict[str, tuple[str, Callable[[Repeat], float | None]]] = {
    "throughput": ("output tokens per second", lambda one: one.output_throughput),
    "tpot": ("ms per output token after the first", lambda one: _milliseconds(one.tpots)),
    "ttft": ("ms to the first token", lambda one: _milliseconds(one.ttfts)),
}
"""By name: the axis' title, and a repeat's value, of latencies the median over its requests."""


def curves_of(verdict: Verdict) -> dict[str, Any]:
    """JSON of figures, sides with their colours, and points; a point has blocks, a block a value by side."""
    sides = {"baseline": BASELINE_COLOUR, "artifact": ARTIFACT_COLOUR}
    if verdict.rivals:
        sides |= {"rival": RIVAL_COLOUR}
    decided = {point.m: point for point in verdict.curve}
    measured = sorted((one for one in verdict.evidence.measured if one.m in decided), key=lambda one: one.m)
    start = min((_began(block) for one in measured for block in one.blocks), default=0.0)
    return {
        "floor": verdict.bounds.throughput_floor,
        "floorColour": FLOOR_COLOUR,
        "sides": sides,
        "figures": {
            "ratio": "output throughput, artifact ÷ baseline",
            **{name: title for name, (title, _) in FIGURES.items()},
        },
        "points": [
            {
                "m": one.m,
                "status": decided[one.m].status,
                "ratio": [decided[one.m].ratio_low, decided[one.m].ratio, decided[one.m].ratio_high],
                "blocks": [_block(block, list(sides), start) for block in one.blocks],
            }
            for one in measured
        ],
    }


def _began(block: Block) -> float:
    return min((repeat.began for repeat in block.repeats), default=0.0)


def _block(block: Block, sides: list[str], start: float) -> dict[str, Any]:
    repeats: dict[str, list[Repeat]] = {side: getattr(block, side) for side in sides}
    values = {
        name: {side: _shown([figure(one) for one in own]) for side, own in repeats.items()}
        for name, (_, figure) in FIGURES.items()
    }
    ours, base = values["throughput"]["artifact"], values["throughput"]["baseline"]
    ratio = _rounded(ours / base) if ours and base else None
    began = round(_began(block) - start, 1)
    return {"began": began, "restarts": block.restarts, "ratio": {"artifact": ratio}, **values}


def _shown(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return _rounded(median(known)) if known else None


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def _milliseconds(seconds: tuple[float, ...]) -> float | None:
    return 1000 * median(seconds) if seconds else None
