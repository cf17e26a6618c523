"""Whether the artifact's server does what requests ask for: stop strings, ends, lengths, prompts.

A deviation that both servers show belongs to the engine and says nothing about the artifact: such kinds are
unknown.
"""

import math
from collections import Counter
from collections.abc import Sequence

from ...evidence.in_use import FiguresInUse, SideInUse
from ...evidence.verdict import CheckResult, CheckStatus

NAME = "answers as asked"
SHOWN = 6
"""How many kinds of answers that are not as asked are shown, with one of each."""
FEWEST_SEEDS = 2
"""The least number of answers with a repeated seed from which on rounding cannot be why all of them differ.
One in 25 sound answers differs in its first tokens (`evidence/as_asked.py`), so both of two in one of 600
runs."""
SURELY = 3.0
"""By how many standard deviations the artifact's server must deviate more often than the baseline's, if that
one deviates too: then the engine does, and how often is chance."""
SEEDS = "sampled: the same prompt and seed gave another answer"


def check_as_asked(in_use: FiguresInUse) -> CheckResult:
    """Fail if answers of some kind are not as requested, and surely more of the artifact's than of the
    baseline's."""
    bound = "none that the baseline answers as asked"
    pairs = [(block.artifact, block.baseline) for block in in_use.blocks if block.artifact and block.baseline]
    answered = sum(len(artifact.ttfts) for artifact, _ in pairs)
    if not answered:
        return CheckResult(NAME, "inconclusive", "nothing", bound, "no block of requests was finished")
    ours, theirs = (
        Counter(words for pair in pairs for words in pair[side].not_as_asked)
        + _ignored_seeds([pair[side] for pair in pairs])
        for side in (0, 1)
    )
    by_kind, baseline_by_kind = _by_kind(ours), _by_kind(theirs)
    wrong = {kind for kind, count in by_kind.items() if _is_more(count, baseline_by_kind[kind])}
    alike = by_kind.keys() - wrong
    status: CheckStatus = "fail" if wrong else "unknown" if alike or in_use.unknown else "pass"
    told = [f"{_example(ours, kind)} ({count}×)" for kind, count in by_kind.most_common() if kind in wrong]
    told = told[:SHOWN] + ([f"and {len(wrong) - SHOWN} kinds more"] if len(wrong) > SHOWN else [])
    told += [f"{kind}: the baseline's server does not answer as asked either" for kind in sorted(alike)]
    told += list(in_use.unknown)
    count = sum(by_kind[kind] for kind in wrong)
    return CheckResult(
        name=NAME,
        status=status,
        measured=f"{count} of {answered} answers are not as asked",
        bound=bound,
        reason="; ".join(told)
        or "greedy, sampled and chat requests, with stop strings, ends and log-probabilities, got what they "
        "asked for",
        figures={"answers": answered, "not_as_asked": ours.total(), "baseline_not_as_asked": theirs.total()},
    )


def _is_more(ours: int, theirs: int) -> bool:
    """Say whether so many of the artifact's answers against so many of the baseline's are no chance."""
    return not theirs or ours - theirs > SURELY * math.sqrt(ours + theirs)


def _ignored_seeds(sides: Sequence[SideInUse]) -> Counter[str]:
    """Count one for each repeated seed, if no answer with that seed begins like the answer before."""
    kept = [is_kept for side in sides for is_kept in side.seeds_kept]
    return Counter({SEEDS: len(kept)}) if len(kept) >= FEWEST_SEEDS and not any(kept) else Counter()


def _by_kind(found: Counter[str]) -> Counter[str]:
    kinds: Counter[str] = Counter()
    for words, count in found.items():
        kinds[_kind(words)] += count
    return kinds


def _example(found: Counter[str], kind: str) -> str:
    return next(words for words, _ in found.most_common() if _kind(words) == kind)


def _kind(words: str) -> str:
    return words.partition(":")[0]
