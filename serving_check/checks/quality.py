"""How far the artifact may be from its baseline on held-out text; the measuring is `..quality`.

The bounds leave a sound 4-bit artifact a small margin. The bounds on the tail catch what a mean hides: a few
tokens, or a few packed words, that are wrong while everything else is right.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..evidence.quality_figures import Comparison
from ..evidence.verdict import CheckResult, Status, finite
from ..settings import Bounds

NAME = "quality"
BEYOND_ROUNDING_KL, BEYOND_ROUNDING_AGREEMENT = 0.5, 0.5
"""Rounding weights to 4 bits costs hundredths of a nat, to 2 bits up to half a nat."""


@dataclass(frozen=True)
class _Figure:
    """One figure beside its bound; `sign` is -1 where more is better."""

    name: str
    words: str
    value: float
    bound: float
    digits: str
    sign: int = 1
    is_tail: bool = False
    is_extreme: bool = False
    """One observed value is enough to fail: its interval does not matter."""

    def status(self, comparison: Comparison) -> Status:
        if self.sign * self.value <= self.sign * self.bound:
            return "pass"
        limits = comparison.intervals.get(self.name)
        if limits is None or self.is_extreme:
            return "fail"
        nearest = limits[0] if self.sign > 0 else limits[1]
        return "fail" if self.sign * nearest > self.sign * self.bound else "inconclusive"

    def shown(self, comparison: Comparison) -> str:
        limits = comparison.intervals.get(self.name)
        between = f" [{limits[0]:{self.digits}}, {limits[1]:{self.digits}}]" if limits else ""
        return f"{self.words} {self.value:{self.digits}}{between}"

    def problem(self, comparison: Comparison) -> str:
        side = "above" if self.sign > 0 else "below"
        return f"{self.shown(comparison)} is {side} {self.bound:{self.digits}}"


def check_quality(
    comparison: Comparison, bounds: Bounds, worst_modules: Sequence[str] = (), by_layers: bool = False
) -> CheckResult:
    """Mean, 99.9th percentile and maximum of KL, extra nats per token, top-1 agreement, each in its bound.

    It fails if a whole interval is beyond its bound, and is inconclusive if only the estimate is.

    worst_modules: those with the largest rounding errors, worst first, for the advice
    by_layers: whether the models were run a layer at a time, which the reason then says
    """
    figures = _figures(comparison, bounds)
    bad = [figure for figure in figures if figure.status(comparison) != "pass"]
    statuses = {figure.status(comparison) for figure in bad}
    status: Status = "fail" if "fail" in statuses else "inconclusive" if statuses else "pass"
    if not all(map(math.isfinite, (comparison.mean_kl, comparison.nats_per_token))):
        status = "fail"
        reason = (
            "its logits are not finite: NaN or Inf in its weights or scales, or an overflow in a kernel. The "
            "weights check names a module with such values; another recipe will not help"
        )
    elif status == "fail":
        problems = "; ".join(figure.problem(comparison) for figure in bad)
        reason = f"{problems}. {_advice(comparison, bad, worst_modules)}"
    elif status == "inconclusive":
        problems = "; ".join(figure.problem(comparison) for figure in bad)
        reason = (
            f"{problems}, but the text may be too short to tell: validate on more tokens (--quality-tokens)"
        )
    else:
        reason = f"computed over the whole vocabulary, on {comparison.tokens} held-out tokens"
    if by_layers:
        reason += "; run a layer at a time with dequantized weights, since the models did not fit in memory"
    return CheckResult(
        name=NAME,
        status=status,
        measured=", ".join(figure.shown(comparison) for figure in figures),
        bound=", ".join(
            f"{figure.words} at {'most' if figure.sign > 0 else 'least'} {figure.bound:{figure.digits}}"
            for figure in figures
        ),
        reason=reason,
        figures=_recorded(comparison),
    )


def _figures(comparison: Comparison, bounds: Bounds) -> list[_Figure]:
    extra, agreement = comparison.extra_nats_per_token, comparison.top1_agreement
    return [
        _Figure("mean_kl", "mean KL", comparison.mean_kl, bounds.max_mean_kl, ".4f"),
        _Figure("p999_kl", "99.9% KL", comparison.p999_kl, bounds.max_p999_kl, ".2f", is_tail=True),
        _Figure(
            "max_kl", "largest KL", comparison.max_kl, bounds.max_max_kl, ".2f", is_tail=True, is_extreme=True
        ),
        _Figure("extra_nats_per_token", "extra nats per token", extra, bounds.max_extra_nats, "+.4f"),
        _Figure("top1_agreement", "top-1 agreement", agreement, bounds.min_top1_agreement, ".1%", sign=-1),
    ]


def _advice(comparison: Comparison, bad: Sequence[_Figure], worst_modules: Sequence[str]) -> str:
    """The likely cause of these figures, and what to do."""
    if (
        comparison.mean_kl > BEYOND_ROUNDING_KL
        or comparison.top1_agreement < BEYOND_ROUNDING_AGREEMENT
        or comparison.extra_nats_per_token > BEYOND_ROUNDING_KL
    ):
        return (
            "Rounding does not cause errors this large, so a finer recipe will not help. The weights are not "
            "the baseline's, or are in another order (layers, or rows of the vocabulary), or their scales "
            "and zero points are not read as they were written"
        )
    if all(figure.is_tail for figure in bad):
        return (
            "Most tokens are predicted well and a few are far off, which rounding does not cause: look for "
            "changed rows of the embeddings or of lm_head, or for damaged packed words"
        )
    keep = f" ({', '.join(worst_modules)})" if worst_modules else ""
    return (
        "Quantize with more bits per weight, such as smaller groups where the format has them, or keep the "
        f"layers with the largest errors{keep} unquantized"
    )


def _recorded(comparison: Comparison) -> dict[str, float | int | str | None]:
    names = ("mean_kl", "p99_kl", "p999_kl", "max_kl", "extra_nats_per_token", "top1_agreement")
    recorded: dict[str, float | int | str | None] = {
        "tokens": comparison.tokens,
        "nats_per_token": finite(comparison.nats_per_token),
        "baseline_nats_per_token": finite(comparison.baseline_nats_per_token),
    }
    for name in names:
        recorded[name] = finite(getattr(comparison, name))
        if name in comparison.intervals:
            recorded[f"{name}_low"], recorded[f"{name}_high"] = comparison.intervals[name]
    return recorded
