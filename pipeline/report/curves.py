"""The figures behind the page's curves: every block of every M, each side's repeats in the order they ran.

Plain data for `curves.js`, which draws them; made from the verdict alone.
"""

from collections.abc import Callable
from statistics import median
from typing import Any

from ...serving_check.evidence.measurement import Block, Repeat
from ...serving_check.evidence.verdict import Verdict

DIGITS = 5
"""Number of significant digits: more are not visible."""
FIGURES: dict[str, tuple[str, Callable[[Repeat], float | None]]] = {
    "throughput": ("output tokens per second", lambda repeat: repeat.output_throughput),
    "tpot": ("ms per output token after the first", lambda repeat: _milliseconds(repeat.tpots)),
    "ttft": ("ms to the first token", lambda repeat: _milliseconds(repeat.ttfts)),
}
"""For each figure, the axis' title and the function that takes it from a repeat; latencies are medians over
requests."""


def curves_of(verdict: Verdict) -> dict[str, Any]:
    """Return JSON of figures, sides and points; a point has blocks, a block a value by side."""
    sides = ["baseline", "artifact", *(["rival"] if verdict.rivals else [])]
    decided = {point.m: point for point in verdict.curve}
    measured = sorted(
        (each for each in verdict.evidence.measured if each.m in decided), key=lambda each: each.m
    )
    start = min((_began(block) for each in measured for block in each.blocks), default=0.0)
    return {
        "floor": verdict.bounds.throughput_floor,
        "sides": sides,
        "figures": {
            "ratio": "output throughput, artifact ÷ baseline",
            **{name: title for name, (title, _) in FIGURES.items()},
        },
        "points": [
            {
                "m": each.m,
                "drawn": decided[each.m].drawn,
                "status": decided[each.m].status,
                "ratio": [decided[each.m].ratio_low, decided[each.m].ratio, decided[each.m].ratio_high],
                "blocks": [_block(block, sides, start) for block in each.blocks],
            }
            for each in measured
        ],
    }


def _began(block: Block) -> float:
    return min((repeat.began for repeat in block.repeats), default=0.0)


def _block(block: Block, sides: list[str], start: float) -> dict[str, Any]:
    repeats: dict[str, list[Repeat]] = {side: getattr(block, side) for side in sides}
    values = {
        name: {side: _shown([figure(repeat) for repeat in own]) for side, own in repeats.items()}
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
