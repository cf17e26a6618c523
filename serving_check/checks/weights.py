"""Whether the stored weights are the baseline's, except for the declared rounding.

An artifact with a manifest must match it: every module's error as recorded, everything else bit for bit. In
every artifact the check also looks for modules that stand out from their kind: a manifest only records
errors, also those that `adopt` found, and does not vouch for them.
"""

import math
from collections.abc import Iterator

from ..evidence.artifact_figures import KindErrors, ModuleError, WeightFigures
from ..evidence.verdict import CheckResult

NAME = "weights"
TOLERANCE = 1e-3
"""The largest relative difference between a module's recorded error and the same error computed again. The
order of sums and six recorded digits cause 1e-6 to 1e-5, torchao's zero points in bf16 at most 5e-4. If five
in a million 4-bit codes are replaced by random ones, the difference is larger."""
OUTLIER_RATIO = 2.0
OUTLIER_DEVIATIONS = 6.0
"""A module stands out from its kind if its error is this many times the median, and this many robust standard
deviations (1.4826 times the median absolute deviation) of the errors' logarithms above it."""
LEAST_DEVIATION = 0.05
NEGLIGIBLE = 0.01
"""Errors up to this come from 8 bits or more, or from weights that were exact before."""
MAD_TO_DEVIATION = 1.4826
SHOWN = 3


def check_weights(figures: WeightFigures | None) -> CheckResult:
    """Without figures the result is unknown: the baseline is quantized itself."""
    bound = (
        "the baseline's weights, rounded as the manifest says and otherwise equal; no module with an error "
        "far from others of its kind"
    )
    if figures is None:
        reason = "the baseline is quantized itself, so there are no source weights to compare with"
        return CheckResult(NAME, "unknown", "not known", bound, reason)
    if not figures.is_ours:
        bound = "no module with an error far from others of its kind, and no tensor changed in part"
    problems = list(_count_problems(figures))
    problems += _recorded_problems(figures) or _outliers(figures)
    problems += _kept_problems(figures)
    worst = max((module for module in _all(figures)), key=_size, default=None)
    return CheckResult(
        name=NAME,
        status="fail" if problems else "pass",
        measured=f"{figures.quantized} modules quantized, "
        + (f"largest relative error {_shown(worst)}, " if worst else "")
        + f"{figures.kept - figures.changed_tensors} of {figures.kept} other tensors equal",
        bound=bound,
        reason="; ".join(problems) or _praise(figures),
        figures={
            "quantized_modules": figures.quantized,
            "recorded_modules": figures.recorded,
            "compared_modules": figures.compared,
            "kept_tensors": figures.kept,
            "changed_tensors": figures.changed_tensors,
            "largest_relative_error": worst.relative_error if worst else None,
        },
    )


def largest_errors(figures: WeightFigures | None) -> list[str]:
    """Return the modules with the largest errors among the named ones, worst first, for advice."""
    named = sorted(_all(figures), key=_size, reverse=True) if figures else []
    return [f"{error.module} {_shown(error)}" for error in named[:SHOWN]]


def _count_problems(figures: WeightFigures) -> Iterator[str]:
    """List problems unless something is quantized, and exactly the modules that the manifest names."""
    may_be_plain = (figures.is_baseline and not figures.is_ours) or figures.is_other_quantized
    if not figures.quantized and not may_be_plain:
        said = f", but its manifest lists {figures.recorded}" if figures.recorded else ""
        yield f"no module is quantized{said}: these are unquantized weights"
    elif figures.not_quantized:
        yield f"the manifest says that {_list(figures.not_quantized)} are quantized, but they are not"
    if figures.routers:
        yield (
            f"{_list(figures.routers)} are routers and are quantized: rounding a router sends tokens to "
            "other experts. Keep routers unquantized"
        )
    if figures.is_ours and figures.not_recorded:
        yield f"{_list(figures.not_recorded)} are quantized, but the manifest does not list them"
    if figures.is_ours and figures.missing:
        yield f"the artifact has no counterpart of the baseline's {_list(figures.missing)}"
    if figures.is_ours and figures.unknown:
        yield f"the baseline has no counterpart of {_list(figures.unknown)}, or one of another shape"


def _recorded_problems(figures: WeightFigures) -> list[str]:
    wrong = [error for error in _all(figures) if not _is_as_recorded(error)]
    if not wrong:
        return []
    named = ", ".join(
        f"{error.module} (relative error {_shown(error)}, recorded {error.recorded:.4g})"
        for error in wrong[:SHOWN]
        if error.recorded is not None
    )
    more = f" and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
    return [
        f"the weights are not the ones that were quantized: {named}{more}. Codes, scales or zero points are "
        "damaged or swapped; quantize again"
    ]


def _is_as_recorded(error: ModuleError) -> bool:
    if error.recorded is None:
        return True  # without a manifest, or named by `not_recorded`
    if error.relative_error is None:
        return False
    return math.isclose(error.relative_error, error.recorded, rel_tol=TOLERANCE, abs_tol=1e-6)


def _outliers(figures: WeightFigures) -> list[str]:
    found = [(kind, error) for kind in figures.kinds for error in kind.furthest if _stands_out(kind, error)]
    if not found:
        return []
    named = ", ".join(
        f"{error.module} (relative error {_shown(error)}, its kind's median {kind.median or 0.0:.3f})"
        for kind, error in found[:SHOWN]
    )
    more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return [
        f"modules with errors far from others of their kind: {named}{more}. Rounding to the same format does "
        "not cause that: look for damaged or swapped weights, scales or zero points"
    ]


def _stands_out(kind: KindErrors, error: ModuleError) -> bool:
    if error.relative_error is None or kind.median is None:
        return True
    if error.relative_error <= max(OUTLIER_RATIO * kind.median, NEGLIGIBLE):
        return False
    if not kind.median:
        return True
    deviation = max(LEAST_DEVIATION, MAD_TO_DEVIATION * kind.spread)
    return math.log(error.relative_error / kind.median) > OUTLIER_DEVIATIONS * deviation


def _kept_problems(figures: WeightFigures) -> Iterator[str]:
    """List every change in an artifact of ours; in another tool's, tensors with a few changed rows.

    Another tool may fold scales into norms or rotate the embeddings, which changes every row.
    """
    wrong = [tensor for tensor in figures.changed if figures.is_ours or 0 < tensor.rows <= tensor.of / 2]
    if wrong:
        named = ", ".join(f"{tensor.name} ({tensor.rows} of {tensor.of} rows)" for tensor in wrong[:SHOWN])
        count = max(len(wrong), figures.changed_tensors if figures.is_ours else 0)
        more = f" and {count - SHOWN} more" if count > SHOWN else ""
        yield f"not quantized, but different from the baseline's: {named}{more}"


def _praise(figures: WeightFigures) -> str:
    if not figures.quantized:
        return (
            "nothing is quantized: these are the baseline's own weights, to test the gate or a KV format"
            if figures.is_baseline
            else "the weights are not quantized; keys and values are"
        )
    if figures.is_ours:
        return "every module has the error that the manifest records, like others of its kind"
    changed = (
        f"; {figures.changed_tensors} other tensors are changed entirely, which the quality check judges"
        if figures.changed_tensors
        else ""
    )
    return (
        f"there is no manifest to compare with; {figures.compared} modules have errors like others of their "
        f"kind{changed}"
    )


def _all(figures: WeightFigures) -> Iterator[ModuleError]:
    return (error for kind in figures.kinds for error in kind.furthest)


def _size(error: ModuleError) -> float:
    return math.inf if error.relative_error is None else error.relative_error


def _shown(error: ModuleError) -> str:
    return "not finite" if error.relative_error is None else f"{error.relative_error:.4g}"


def _list(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
