"""Whether other readers read the artifact's files as Scalegate does.

A release is loaded by transformers, vLLM and others, by rules of their own. Files that one reader skips or
reads differently serve well in this gate and badly everywhere else.
"""

import math

from ..evidence.artifact_figures import ReadElsewhere, ReaderFigures
from ..evidence.verdict import CheckResult, Status

NAME = "other readers"
MAX_MEAN_KL = 0.02
"""Nats a token between two readers of the same numbers that round in other orders.

Rounding to bfloat16 errs by a share of at most 2^-9, uniformly: 2^-9/√3 is its standard deviation. Of 80
layers with a dozen roundings each, independent, √960 times as much stays: 3.5%, and 5% between two readers.
Where logits spread over 4 nats, these then differ by 0.2 nats, and half the square of that is the divergence.
"""


def check_other_readers(figures: ReaderFigures | None) -> CheckResult:
    """Fail if a file is read otherwise elsewhere, by the file's own words or by another reader's logits."""
    bound = f"nothing read otherwise, mean KL at most {MAX_MEAN_KL:g}"
    if figures is None:
        return CheckResult(
            NAME, "unknown", "nothing", bound, "the files were not looked at as others read them"
        )
    differing = [read for read in figures.elsewhere if read.refused is None and _differs(read)]
    refusing = [read for read in figures.elsewhere if read.refused is not None]
    agreeing = [read for read in figures.elsewhere if read.refused is None and not _differs(read)]
    status: Status = "fail" if figures.misreadings or differing else "pass"
    told = [*figures.misreadings, *map(_difference, differing)]
    told += [
        f"{read.reader} could not load it here, so that is not known: {read.refused}" for read in refusing
    ]
    told += [f"{read.reader} predicts the same" for read in agreeing]
    divergences = [read.mean_kl for read in figures.elsewhere if read.mean_kl is not None]
    return CheckResult(
        name=NAME,
        status=status,
        measured=_measured(figures, differing, agreeing),
        bound=bound,
        reason="; ".join(told) or "its files say nothing that other readers take otherwise",
        figures={
            "misreadings": len(figures.misreadings),
            "mean_kl": max(divergences, default=None),
        },
    )


def _differs(read: ReadElsewhere) -> bool:
    return read.mean_kl is None or not math.isfinite(read.mean_kl) or read.mean_kl > MAX_MEAN_KL


def _difference(read: ReadElsewhere) -> str:
    how = "no finite numbers" if read.mean_kl is None else f"mean KL {read.mean_kl:.3g} nats from ours"
    same = f", the same token first at {read.top1_agreement:.0%}" if read.top1_agreement is not None else ""
    return f"{read.reader} predicts otherwise from the same files: {how}{same}"


def _measured(figures: ReaderFigures, differing: list[ReadElsewhere], agreeing: list[ReadElsewhere]) -> str:
    count = len(figures.misreadings)
    parts = [f"{count} fields or files read otherwise" if count else "nothing read otherwise"]
    for read in (*differing, *agreeing):
        if read.mean_kl is not None:
            parts.append(f"mean KL {read.mean_kl:.2g} by {read.reader.split(' ')[0]}")
    refusing = (read for read in figures.elsewhere if read.refused is not None)
    return ", ".join([*parts, *(f"{read.reader.split(' ')[0]} did not load it" for read in refusing)])
