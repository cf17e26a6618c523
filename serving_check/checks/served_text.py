"""Whether text served under load is the artifact's own: each token is compared with the artifact's logits.

Except for rounding, a greedy token has the highest logit of the model that wrote it. A token without the
highest logit was written by another model or by a kernel that is wrong for a batch, or was changed on its
way.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

from ..evidence.answer_figures import AnswerFigures
from ..evidence.evidence import TextScore
from ..evidence.measurement import MeasuredM, answers_of
from ..evidence.verdict import CheckResult, Status
from ..settings import Bounds
from ..statistics.decide import chance_of_as_many

NAME = "served text"
CHANCE = 0.05
"""The check fails if both sides would give such answers equally often and so many of them come from the
artifact with at most this chance. One such answer of eleven does not fail, five of eleven do."""
LOGIT_TOLERANCE = 0.25
"""How many nats a greedy token may lie below the best one: 16-bit sums depend on their order."""
SURELY = 3.0
"""By how many standard deviations the baseline's logits must explain a text better than the artifact's."""
FEWEST_OFF = 4
"""How many tokens of one text must be off for the text to count as foreign: near ties happen."""
FEWEST_ANSWERS = 8
"""How many answers each side needs at an M to judge likeness: a small model sometimes repeats itself."""
SHOWN = 3
SHOWN_CHARACTERS = 40


def may_be_baselines(off: int) -> bool:
    """Say whether so many tokens are off that, whatever the baseline's logits say, they may explain the texts
    better than the artifact's do. If not, the baseline's logits need not be computed.
    """
    return is_baselines(off, 0)


def is_baselines(off: int, baseline_off: int) -> bool:
    """Say whether the baseline's logits surely explain the texts better than the artifact's logits do.

    off, baseline_off: how many tokens are off by the artifact's logits, and by the baseline's
    """
    return off - baseline_off > SURELY * math.sqrt(off + baseline_off)


def tokens_off(gaps: Sequence[float]) -> int:
    """Return how many tokens lie too far below the best one to be explained by rounding; NaN counts."""
    return sum(not gap <= LOGIT_TOLERANCE for gap in gaps)


def sum_of_known(counts: Iterable[int | None]) -> int | None:
    """Return the sum of `counts`; None if any of them is not known."""
    known = list(counts)
    return None if None in known else sum(count or 0 for count in known)


def check_served_text(
    scores: Sequence[TextScore], measured: Sequence[MeasuredM], bounds: Bounds
) -> CheckResult:
    """Fail if tokens are not the artifact's own, or answers are more alike than the baseline's."""
    bound = (
        f"at most {bounds.max_foreign_tokens:.0%} of tokens more than {LOGIT_TOLERANCE:g} nats below "
        f"the artifact's best logit, and {bounds.max_foreign_text:.0%} in any one text"
    )
    tokens = sum(score.tokens for score in scores)
    if not tokens:
        return CheckResult(NAME, "inconclusive", "nothing", bound, "no text was served under load")
    off = sum(score.off for score in scores)
    baseline_off = sum_of_known(score.baseline_off for score in scores)
    foreign = [
        score
        for score in scores
        if score.off >= FEWEST_OFF and score.off > bounds.max_foreign_text * score.tokens
    ]
    artifact = {level.m: answers_of(level.artifact) for level in measured}
    baseline = {level.m: answers_of(level.baseline) for level in measured}
    problems = _changed(artifact)
    if is_baselines(off, baseline_off or 0):
        problems.append(
            f"{off} of {tokens} tokens are not the artifact's greedy choice, only {baseline_off} are not "
            "the baseline's: the artifact's server serves the baseline or a similar model"
        )
    elif off > bounds.max_foreign_tokens * tokens or foreign:
        problems.append(_wrong(scores, foreign, off, tokens))
    problems += _likeness(artifact, baseline, bounds)
    status: Status = "fail" if problems else "pass"
    return CheckResult(
        name=NAME,
        status=status,
        measured=f"{off / tokens:.1%} of {tokens} tokens are not the artifact's own greedy ones",
        bound=bound,
        reason="; ".join(problems)
        or f"every token of {len(scores)} texts served under load was compared with logits computed here",
        figures={
            "texts": len(scores),
            "tokens": tokens,
            "off": off,
            "baseline_off": baseline_off,
            "foreign_texts": len(foreign),
        },
    )


def _changed(artifact: Mapping[int, AnswerFigures]) -> list[str]:
    return [
        f"at M={m} the text of {figures.not_its_tokens} of {figures.answers} answers does not match their "
        "token ids: it was changed between the engine and the client, or decoded wrongly"
        for m, figures in artifact.items()
        if figures.not_its_tokens
    ]


def _wrong(scores: Sequence[TextScore], foreign: Sequence[TextScore], off: int, tokens: int) -> str:
    """Return the fault and its likely cause: all texts are wrong, or only texts of some batch sizes."""
    by_m = {m: sum(score.m == m for score in foreign) for m in sorted({score.m for score in foreign})}
    where = ", ".join(f"{count} of {_texts(scores, m)} at M={m}" for m, count in by_m.items())
    shown = "; ".join(repr(score.beginning) for score in foreign[:SHOWN])
    texts = f" (texts: {where}, such as {shown})" if foreign else ""
    clean = [score for score in scores if score.m not in by_m]
    cause = (
        "another model is served, or text is changed on its way to the client"
        if not foreign or not clean
        else "only that load is wrong: look at the kernel for that batch size, or at how the server batches "
        "requests"
    )
    return f"{off} of {tokens} tokens are not what the artifact's own logits give{texts}: {cause}"


def _texts(scores: Sequence[TextScore], m: int) -> int:
    return sum(score.m == m for score in scores)


def _likeness(
    artifact: Mapping[int, AnswerFigures], baseline: Mapping[int, AnswerFigures], bounds: Bounds
) -> list[str]:
    problems = []
    for m, ours in artifact.items():
        theirs = baseline[m]
        if min(ours.answers, theirs.answers) < FEWEST_ANSWERS:
            continue
        for what, count, usual, most in (
            ("repeat another answer", ours.duplicates, theirs.duplicates, bounds.max_duplicates),
            ("are one token repeated", ours.one_token, theirs.one_token, bounds.max_one_token),
        ):
            chance = chance_of_as_many(count, usual, ours.answers / (ours.answers + theirs.answers))
            if count / ours.answers > usual / theirs.answers + most and chance <= CHANCE:
                problems.append(
                    f"at M={m} {count} of {ours.answers} answers {what}, {usual} of the baseline's "
                    f"{theirs.answers}"
                )
        if ours.variety < bounds.min_variety * theirs.variety:
            problems.append(
                f"at M={m} answers repeat themselves: {ours.variety:.0%} of an answer's tokens are distinct, "
                f"{theirs.variety:.0%} of the baseline's"
            )
    return problems
