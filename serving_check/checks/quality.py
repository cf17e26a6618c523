"""How far the artifact may be from its baseline on held-out text; the measuring is `..quality`.

The bounds leave a sound 4-bit artifact a small margin. The bounds on the tail catch faults that a mean hides:
a few tokens, or a few packed words, that are wrong while everything else is right. The bound on the mean
holds for each domain too: a kind of text that is far off is not excused by the other kinds. A text that the
user gives must meet all bounds by itself.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from ..evidence.quality_figures import Comparison
from ..evidence.verdict import CheckResult, Status, finite
from ..settings import Bounds

NAME = "quality"
BEYOND_ROUNDING_KL, BEYOND_ROUNDING_AGREEMENT = 0.5, 0.5
"""Rounding weights to 4 bits costs hundredths of a nat, to 2 bits up to half a nat."""
NOT_FINITE = (
    "its logits are not finite: NaN or Inf in its weights or scales, or an overflow in a kernel. The weights "
    "check names a module with such values; another recipe will not help"
)


@dataclass(frozen=True)
class _Figure:
    """One figure of one text with its bound; `sign` is -1 if higher is better."""

    comparison: Comparison
    name: str
    words: str
    value: float
    bound: float
    digits: str
    sign: int = 1
    is_tail: bool = False
    is_extreme: bool = False
    """One observed value is enough to fail: its interval does not matter."""
    where: str = ""
    """Which text the figure belongs to, for messages; empty for the whole of the usual text."""

    @property
    def status(self) -> Status:
        if self.sign * self.value <= self.sign * self.bound:
            return "pass"
        limits = self.comparison.intervals.get(self.name)
        if limits is None or self.is_extreme:
            return "fail"
        nearest = limits[0] if self.sign > 0 else limits[1]
        return "fail" if self.sign * nearest > self.sign * self.bound else "inconclusive"

    def shown(self) -> str:
        limits = self.comparison.intervals.get(self.name)
        between = f" [{limits[0]:{self.digits}}, {limits[1]:{self.digits}}]" if limits else ""
        return f"{self.words} {self.value:{self.digits}}{between}"

    def problem(self) -> str:
        side = "above" if self.sign > 0 else "below"
        return f"{self.shown()}{self.where} is {side} {self.bound:{self.digits}}"


def check_quality(
    comparison: Comparison,
    bounds: Bounds,
    worst_modules: Sequence[str] = (),
    by_layers: bool = False,
    by_domain: Mapping[str, Comparison] = MappingProxyType({}),
    given: Comparison | None = None,
    foreign: Mapping[str, float] = MappingProxyType({}),
) -> CheckResult:
    """Judge mean, 99.9th percentile and maximum of KL, extra nats per token and top-1 agreement, each in its
    bound.

    The check fails if a figure's whole interval is beyond its bound, and is inconclusive if only the estimate
    is.

    worst_modules: the modules with the largest rounding errors, worst first, for the advice
    by_layers: whether the models were run a layer at a time, which the reason then says
    by_domain: the parts of `comparison`; the mean KL of each has the bound of the whole
    given: the comparison on the text that the user gave, if any
    foreign: domains that were left out, and the bits a byte that the baseline needs for them
    """
    usual = _figures(comparison, bounds)
    domains = [_mean_kl(part, bounds, f" on {domain}") for domain, part in by_domain.items()]
    besides = [] if given is None else _figures(given, bounds, " on the text given")
    bad = [figure for figure in (*usual, *domains, *besides) if figure.status != "pass"]
    statuses = {figure.status for figure in bad}
    status: Status = "fail" if "fail" in statuses else "inconclusive" if statuses else "pass"
    problems = "; ".join(figure.problem() for figure in bad)
    if not (_is_finite(comparison) and (given is None or _is_finite(given))):
        status, reason = "fail", NOT_FINITE
    elif status == "fail":
        reason = f"{problems}. {_advice(bad, worst_modules)}"
    elif status == "inconclusive":
        reason = (
            f"{problems}, but the text may be too short to tell: validate on more tokens (--quality-tokens)"
        )
    else:
        reason = f"computed over the whole vocabulary, on {comparison.tokens} held-out tokens"
        if given is not None:
            reason += f" and {given.tokens} of the text given"
    if foreign:
        left_out = ", ".join(f"{domain} ({bits:.1f} bits a byte)" for domain, bits in foreign.items())
        reason += f"; without {left_out}, which the baseline cannot predict"
    if by_layers:
        reason += "; run a layer at a time with dequantized weights, since the models did not fit in memory"
    return CheckResult(
        name=NAME,
        status=status,
        measured=_measured(usual, domains, besides),
        bound=", ".join(
            f"{figure.words} at {'most' if figure.sign > 0 else 'least'} {figure.bound:{figure.digits}}"
            for figure in usual
        )
        + ("; the mean KL of each kind of text at most the same" if domains else ""),
        reason=reason,
        figures=_recorded(comparison)
        | {f"mean_kl_{domain}": finite(part.mean_kl) for domain, part in by_domain.items()}
        | ({} if given is None else {f"given_{name}": value for name, value in _recorded(given).items()}),
    )


def _is_finite(comparison: Comparison) -> bool:
    return math.isfinite(comparison.mean_kl) and math.isfinite(comparison.nats_per_token)


def _figures(comparison: Comparison, bounds: Bounds, where: str = "") -> list[_Figure]:
    extra, agreement = comparison.extra_nats_per_token, comparison.top1_agreement
    figures = [
        _Figure(
            comparison, "p999_kl", "99.9% KL", comparison.p999_kl, bounds.max_p999_kl, ".2f", is_tail=True
        ),
        _Figure(
            comparison,
            "max_kl",
            "largest KL",
            comparison.max_kl,
            bounds.max_max_kl,
            ".2f",
            is_tail=True,
            is_extreme=True,
        ),
        _Figure(
            comparison, "extra_nats_per_token", "extra nats per token", extra, bounds.max_extra_nats, "+.4f"
        ),
        _Figure(
            comparison,
            "top1_agreement",
            "top-1 agreement",
            agreement,
            bounds.min_top1_agreement,
            ".1%",
            sign=-1,
        ),
    ]
    return [_mean_kl(comparison, bounds, where), *(replace(figure, where=where) for figure in figures)]


def _mean_kl(comparison: Comparison, bounds: Bounds, where: str) -> _Figure:
    return _Figure(
        comparison, "mean_kl", "mean KL", comparison.mean_kl, bounds.max_mean_kl, ".4f", where=where
    )


def _measured(usual: Sequence[_Figure], domains: Sequence[_Figure], besides: Sequence[_Figure]) -> str:
    shown = ", ".join(figure.shown() for figure in usual)
    if domains:
        each = ", ".join(f"{figure.value:{figure.digits}}{figure.where}" for figure in domains)
        shown += f"; mean KL {each}"
    if besides:
        shown += f"; on the text given: {', '.join(figure.shown() for figure in besides)}"
    return shown


def _advice(bad: Sequence[_Figure], worst_modules: Sequence[str]) -> str:
    """Return the likely cause of the figures that failed, and a remedy."""
    if any(
        text.mean_kl > BEYOND_ROUNDING_KL
        or text.top1_agreement < BEYOND_ROUNDING_AGREEMENT
        or text.extra_nats_per_token > BEYOND_ROUNDING_KL
        for text in (figure.comparison for figure in bad)
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
