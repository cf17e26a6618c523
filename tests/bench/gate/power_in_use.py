"""Faults that a load as in use or a look at rest shows, put into the figures of a sound run.

What is recorded is drawn again: blocks of the load, answers, repeats of the first M and the parts of a burst,
each with replacement, so that the machine's noise is real. `power.py` counts what is caught.
"""

import functools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean

from scalegate.serving_check.checks.in_use import at_rest, drift
from scalegate.serving_check.checks.in_use import speed as speed_in_use
from scalegate.serving_check.checks.in_use import text as text_in_use
from scalegate.serving_check.evidence.at_rest import AtRestFigures, BurstPart
from scalegate.serving_check.evidence.in_use import AnswerInUse, SideInUse
from scalegate.serving_check.evidence.verdict import Verdict
from scalegate.serving_check.gate.at_rest import LEAST_LAST, MOST_LAST
from scalegate.tests.bench.gate.simulated_fault import SimulatedFault

SLOWER = (1.05, 1.1, 1.2, 1.5, 2.0, 4.0)
"""Times as long."""
ARRIVAL_PAUSES_S = (0.02, 0.05, 0.1, 0.3)
WRONG_SHARES = (0.02, 0.05, 0.1, 0.3)
"""Of the tokens in the contexts, or beside the prompts, that a fault is of."""
LONG_CONTEXTS = (136, 512, 1000, 4000)
KEPT_BYTES = (256, 1024, 2048, 16384)
"""Bytes a request."""


# A load as in use: speed.


def speed(
    verdict: Verdict, generator: random.Random, change: Callable[[SideInUse], SideInUse]
) -> dict[str, str]:
    figures = verdict.evidence.in_use
    assert figures is not None
    drawn = generator.choices(figures.blocks, k=len(figures.blocks))
    blocks = [replace(block, artifact=change(block.artifact)) for block in drawn if block.artifact]
    scatter = speed_in_use.scatter_of(verdict.evidence.measured)
    repeated = tuple(generator.choices(scatter.repeated, k=len(scatter.repeated)))
    result = speed_in_use.check_speed_in_use(blocks, verdict.bounds, replace(scatter, repeated=repeated))
    return {result.name: result.status}


def slower_at(factor: float, is_slow: Callable[[int], bool]) -> Callable[[SideInUse], SideInUse]:
    """Every token takes `factor` times as long while M is one of these."""

    def change(side: SideInUse) -> SideInUse:
        seconds = {m: count * itl for m, (count, itl) in side.itls_by_m.items()}
        lost = math.fsum(value for m, value in seconds.items() if is_slow(m))
        whole = 1 + (factor - 1) * lost / max(math.fsum(seconds.values()), 1e-9)
        return replace(
            side,
            duration=side.duration * whole,
            tpots=tuple(None if tpot is None else tpot * whole for tpot in side.tpots),
            itls_by_m={
                m: (count, itl * (factor if is_slow(m) else 1)) for m, (count, itl) in side.itls_by_m.items()
            },
        )

    return change


def pausing_at_arrivals(seconds: float) -> Callable[[SideInUse], SideInUse]:
    """No stream moves for so long when a request arrives."""

    def change(side: SideInUse) -> SideInUse:
        steps = math.fsum(count / m for m, (count, _) in side.itls_by_m.items() if m)
        paused = len(side.ttfts) / max(steps, 1.0)
        itl = side.itl_p99
        if itl is not None and paused > 0.01:
            itl = max(itl, seconds + fmean(itl for _, itl in side.itls_by_m.values()))
        return replace(
            side,
            duration=side.duration + seconds * len(side.ttfts),
            ttfts=tuple(None if ttft is None else ttft + seconds for ttft in side.ttfts),
            tpots=tuple(None if tpot is None else tpot + seconds * paused for tpot in side.tpots),
            itl_p99=itl,
        )

    return change


def between_powers(m: int) -> bool:
    return m & (m - 1) != 0


# A load as in use: text.


def text(
    verdict: Verdict, generator: random.Random, tokens_met: Callable[[AnswerInUse], int], wrong: float
) -> dict[str, str]:
    """tokens_met: how many tokens of an answer the fault meets, of which a share of `wrong` becomes wrong"""
    figures = verdict.evidence.in_use
    assert figures is not None
    answers = [
        replace(answer, off=answer.off + sum(generator.random() < wrong for _ in range(tokens_met(answer))))
        for answer in generator.choices(figures.answers, k=len(figures.answers))
        if answer.kind != "sampled"
    ]
    result = text_in_use.check_text_in_use(answers, verdict.bounds)
    return {result.name: result.status}


def beyond(context: int, answer: AnswerInUse) -> int:
    """Tokens of an answer at contexts longer than that."""
    return max(0, min(answer.tokens, answer.prompt_tokens + answer.tokens - context))


def beside_prompts(answer: AnswerInUse) -> int:
    return min(answer.tokens, answer.prompts_beside)


# At rest.


def rest(
    verdict: Verdict, generator: random.Random, change: Callable[[AtRestFigures], AtRestFigures]
) -> dict[str, str]:
    figures = verdict.evidence.at_rest
    assert figures is not None
    result = at_rest.check_at_rest(change(figures))
    return {result.name: result.status}


def keeping(kept: int, figures: AtRestFigures) -> AtRestFigures:
    """So many bytes more of every request."""
    sent, parts = 0, []
    for part in figures.burst:
        sent += part.requests
        memory = None if part.memory_bytes is None else part.memory_bytes + kept * sent
        parts.append(replace(part, memory_bytes=memory))
    return replace(figures, burst=tuple(parts))


def drifting(verdict: Verdict, generator: random.Random, burst: float, last: float) -> dict[str, str]:
    """Requests take `burst` times as long from some part of the burst on, and the first M `last` times as
    long at the end. As in `gate/at_rest.py`, repeats at the end go on while it is not clear.
    """
    figures = verdict.evidence.at_rest
    assert figures is not None
    at = generator.randrange(drift.LEAST_PARTS, len(figures.burst) - drift.LEAST_PARTS + 1)
    pairs = paired(figures.first, figures.baseline_first) + paired(figures.last, figures.baseline_last)
    first = generator.choices(pairs, k=len(figures.first))
    figures = replace(
        figures,
        burst=tuple(
            replace(part, seconds=part.seconds * (burst if index >= at else 1))
            for index, part in enumerate(shuffled(figures.burst, generator))
        ),
        first=tuple(ours for ours, _ in first),
        baseline_first=tuple(theirs for _, theirs in first),
    )
    lasting = [generator.choice(pairs) for _ in range(MOST_LAST)]
    for count in range(LEAST_LAST, MOST_LAST + 1):
        figures = replace(
            figures,
            last=tuple(ours / last for ours, _ in lasting[:count]),
            baseline_last=tuple(theirs for _, theirs in lasting[:count]),
        )
        result = drift.check_drift(figures)
        if result.status != "inconclusive":
            break
    return {result.name: result.status}


def paired(ours: Sequence[float], theirs: Sequence[float]) -> list[tuple[float, float]]:
    return list(zip(ours, theirs, strict=False))


def shuffled(parts: Sequence[BurstPart], generator: random.Random) -> list[BurstPart]:
    return generator.sample(list(parts), len(parts))


def faults() -> list[SimulatedFault]:
    every = slower_at(1.0, bool)
    found = [SimulatedFault("none, in use", "", functools.partial(speed, change=every))]
    for factor in SLOWER:
        for what, is_slow in (("every M", bool), ("each M that is no power of two", between_powers)):
            found.append(
                SimulatedFault(
                    f"{factor:g} times as slow at {what}",
                    speed_in_use.NAME,
                    functools.partial(speed, change=slower_at(factor, is_slow)),
                )
            )
    for seconds in ARRIVAL_PAUSES_S:
        found.append(
            SimulatedFault(
                f"{seconds:g} s of pause when a request arrives",
                speed_in_use.NAME,
                functools.partial(speed, change=pausing_at_arrivals(seconds)),
            )
        )
    for wrong in (0.0, *WRONG_SHARES):
        met = [(f"beyond {context} tokens", functools.partial(beyond, context)) for context in LONG_CONTEXTS]
        for where, tokens_met in (*met, ("at which a prompt came", beside_prompts)):
            found.append(
                SimulatedFault(
                    f"{wrong:.0%} of tokens wrong {where}",
                    text_in_use.NAME if wrong else "",
                    functools.partial(text, tokens_met=tokens_met, wrong=wrong),
                )
            )
    for kept in (0, *KEPT_BYTES):
        found.append(
            SimulatedFault(
                f"{kept} bytes of memory kept a request",
                at_rest.NAME if kept else "",
                functools.partial(rest, change=functools.partial(keeping, kept)),
            )
        )
    for factor in (1.0, *SLOWER):
        found.append(
            SimulatedFault(
                f"{factor:g} times as slow after so many requests",
                drift.NAME if factor > 1 else "",
                functools.partial(drifting, burst=factor, last=factor),
            )
        )
    return found


FAULTS = faults()
