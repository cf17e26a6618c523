"""Whether greedy text served in use is the artifact's own, whatever else was served at the same time.

Each token is compared with the artifact's logits, as in `served_text.py`. If some tokens are wrong, the
reason names the condition that distinguishes wrong answers from right ones: a kind, other requests, a context
or an M.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from ...evidence.in_use import AnswerInUse
from ...evidence.verdict import CheckResult, Status
from ...settings import Bounds
from ..served_text import FEWEST_OFF, LOGIT_TOLERANCE, SHOWN, is_baselines, sum_of_known

NAME = "text in use"
FEWEST_RIGHT = 3
"""The least number of right answers that must not meet a condition for it to be named as a cause."""
FEWEST_IN_RANGE = 3
"""The least number of wrong answers for naming a range of Ms: any two answers span some range."""
PURE = 0.75
"""The share of wrong answers among all answers that meet a condition from which on it is named as a cause."""
MOST_CONDITIONS = 3
CHAT, UNSTREAMED = "chat", "unstreamed"
CONTEXTS = "look at how keys and values of such contexts are stored, found and attended to"
BATCHES = "look at the kernels for that M, and at how the server batches requests"


Holds = Callable[[AnswerInUse], bool]


@dataclass(frozen=True)
class Condition:
    """A condition that wrong answers may have in common."""

    words: str
    """The condition's words, which follow `only answers`."""
    advice: str
    holds: Holds
    limits: int = 0
    """How many numbers in the condition are taken from the wrong answers."""


def check_text_in_use(answers: Sequence[AnswerInUse], bounds: Bounds) -> CheckResult:
    """Fail if greedy tokens are not the artifact's own: too many of all tokens, or of any one answer."""
    bound = (
        f"at most {bounds.max_foreign_tokens:.0%} of greedy tokens more than {LOGIT_TOLERANCE:g} nats below "
        f"the artifact's best logit, and {bounds.max_foreign_text:.0%} in any one answer"
    )
    greedy = [answer for answer in answers if answer.kind != "sampled"]
    tokens = sum(answer.tokens for answer in greedy)
    if not tokens:
        reason = "no greedy answer came under the load as in use"
        return CheckResult(NAME, "inconclusive", "nothing", bound, reason)
    off = sum(answer.off for answer in greedy)
    group = _wrong_group(greedy, bounds)
    baseline_off = sum_of_known(answer.baseline_off for answer in greedy)
    foreign = [answer for answer in greedy if _is_foreign(answer, bounds)]
    status: Status = "fail"
    if is_baselines(off, baseline_off or 0):
        reason = (
            f"{off} of {tokens} tokens are not the artifact's greedy choice, only {baseline_off} are not "
            "the baseline's: the artifact's server serves the baseline or a similar model"
        )
    elif foreign or off > bounds.max_foreign_tokens * tokens:
        wrong = foreign or [
            answer for answer in greedy if answer.off > bounds.max_foreign_tokens * answer.tokens
        ]
        reason = _wrong(greedy, wrong, off, tokens)
    elif group is not None:
        reason = group
    else:
        status = "pass"
        reason = f"every token of {_range_of(greedy)} was compared with logits computed here"
    return CheckResult(
        name=NAME,
        status=status,
        measured=f"{off / tokens:.1%} of {tokens} tokens are not the artifact's own greedy ones",
        bound=bound,
        reason=reason,
        figures={
            "answers": len(greedy),
            "tokens": tokens,
            "off": off,
            "baseline_off": baseline_off,
            "foreign_answers": len(foreign),
        },
    )


def _is_foreign(answer: AnswerInUse, bounds: Bounds) -> bool:
    return answer.off >= FEWEST_OFF and answer.off > bounds.max_foreign_text * answer.tokens


def _wrong_group(greedy: Sequence[AnswerInUse], bounds: Bounds) -> str | None:
    """Return the group of answers with the largest share of tokens that are off, if that share is too large:
    answers that end beyond a power of two, or answers of a kind. The result is None if no share is too large.

    Too many is the bound's share and a standard deviation more: 7 of 200 tokens. If 5% of tokens are wrong,
    the check fails in 87% of runs; if the share is a quarter of the bound, in less than 1 of 10,000.
    """
    largest, words = 0.0, None
    for named, advice, holds in _groups(greedy):
        answers = [answer for answer in greedy if holds(answer)]
        tokens, off = sum(answer.tokens for answer in answers), sum(answer.off for answer in answers)
        allowed = bounds.max_foreign_tokens * tokens
        if off >= FEWEST_OFF and off > allowed + math.sqrt(allowed) and off / tokens > largest:
            largest = off / tokens
            words = (
                f"{off} of {tokens} tokens of answers {named} are not what the artifact's own logits give; "
                f"{advice}"
            )
    return words


def _groups(greedy: Sequence[AnswerInUse]) -> Iterator[tuple[str, str, Holds]]:
    """Yield the words, the advice and the condition of each group."""
    longest = max(map(_context, greedy))
    for context in (1 << power for power in range(longest.bit_length())):
        yield f"beyond {context:,} tokens of context", CONTEXTS, _has_context_from(context + 1)
    for kind in _kinds_of(greedy):
        yield _of_kind(kind), _advice_on(kind), _is_of_kind(kind)


def _wrong(greedy: Sequence[AnswerInUse], wrong: Sequence[AnswerInUse], off: int, tokens: int) -> str:
    shown = ", ".join(repr(answer.beginning) for answer in wrong[:SHOWN])
    what = (
        f"{off} of {tokens} tokens are not what the artifact's own logits give, most of them in "
        f"{len(wrong)} of {len(greedy)} answers (such as {shown})"
    )
    right = [answer for answer in greedy if answer not in wrong]
    conditions = _explanation(wrong, right)
    if not conditions:
        return (
            f"{what}: wrong answers have no kind, company, context or M in common that right ones have not; "
            "another model is served, or text is changed on its way to the client"
        )
    words = " or ".join(condition.words for condition in conditions)
    advice = ", ".join(dict.fromkeys(condition.advice for condition in conditions))
    left = _not_met(conditions, wrong)
    only = f"all but {len(left)} of them are answers {words}" if left else f"only answers {words} are wrong"
    return f"{what}: {only}; {advice}"


def _explanation(wrong: Sequence[AnswerInUse], right: Sequence[AnswerInUse]) -> list[Condition]:
    """Return up to `MOST_CONDITIONS` under which most answers are wrong and most wrong ones were served, or
    the one that all wrong answers and the fewest right answers meet, whichever misplaces fewer answers.

    Where several causes meet, some answers just beyond a limit are right and others wrong. A condition that
    all right answers, or hardly any, meet explains nothing.
    """
    conditions = list(_conditions(wrong, right))

    def met(condition: Condition, answers: Iterable[AnswerInUse]) -> int:
        return sum(map(condition.holds, answers))

    def cost(condition: Condition, answers: Iterable[AnswerInUse]) -> int:
        # A limit that was chosen to suit the wrong answers excludes some right ones by chance.
        return met(condition, answers) + condition.limits

    telling = [condition for condition in conditions if len(right) - met(condition, right) >= FEWEST_RIGHT]
    pure = [
        condition
        for condition in telling
        if met(condition, wrong) >= PURE * (met(condition, wrong) + met(condition, right))
    ]
    chosen: list[Condition] = []
    misplaced = len(wrong)
    while pure and len(chosen) < MOST_CONDITIONS:
        left, spared = _not_met(chosen, wrong), _not_met(chosen, right)
        gains = [met(condition, left) - cost(condition, spared) for condition in pure]
        if max(gains) <= 0:
            break
        chosen.append(pure[gains.index(max(gains))])
        misplaced -= max(gains)
    common = [condition for condition in telling if met(condition, wrong) == len(wrong)]
    best = min(common, key=lambda condition: cost(condition, right), default=None)
    if best is None or (chosen and misplaced <= cost(best, right)):
        return chosen
    return [best]


def _not_met(conditions: Sequence[Condition], answers: Iterable[AnswerInUse]) -> list[AnswerInUse]:
    """Return the answers that meet none of the conditions."""
    return [answer for answer in answers if not any(condition.holds(answer) for condition in conditions)]


def _conditions(wrong: Sequence[AnswerInUse], right: Sequence[AnswerInUse]) -> Iterator[Condition]:
    """Yield all conditions that wrong answers may have in common, the simplest first."""
    for kind in _kinds_of(wrong):
        yield Condition(_of_kind(kind), _advice_on(kind), _is_of_kind(kind))
    yield Condition(
        "beside which a prompt was read",
        "look at steps that read a prompt and decode together",
        lambda answer: answer.prompts_beside > 0,
    )
    contexts, ms = sorted(map(_context, right)), sorted(answer.m for answer in right)
    for least in sorted(set(map(_context, wrong))):
        words = f"beyond {_below(contexts, least)} tokens of context"
        yield Condition(words, CONTEXTS, _has_context_from(least), limits=1)
    for most in sorted(set(map(_context, wrong)), reverse=True):
        words = f"of less than {_above(contexts, most)} tokens of context"
        yield Condition(words, CONTEXTS, _has_context_to(most), limits=1)
    for lowest in sorted({answer.m for answer in wrong}):
        words = f"decoded at an M above {_below(ms, lowest):.1f}"
        yield Condition(words, BATCHES, _has_m_between(lowest, math.inf), limits=1)
    for highest in sorted({answer.m for answer in wrong}, reverse=True):
        words = f"decoded at an M below {_above(ms, highest):.1f}"
        yield Condition(words, BATCHES, _has_m_between(0.0, highest), limits=1)
    if len(wrong) >= FEWEST_IN_RANGE:
        lowest, highest = min(answer.m for answer in wrong), max(answer.m for answer in wrong)
        words = f"decoded at an M of {lowest:.1f} to {highest:.1f}"
        yield Condition(words, BATCHES, _has_m_between(lowest, highest), limits=2)


def _below(values: Iterable[float], limit: float) -> float:
    """Return the largest value below `limit`, or 0 if there is none."""
    return max((value for value in values if value < limit), default=0)


def _above(values: Iterable[float], limit: float) -> float:
    """Return the smallest value above `limit`, or else `limit` plus one."""
    return min((value for value in values if value > limit), default=limit + 1)


def _context(answer: AnswerInUse) -> int:
    return answer.prompt_tokens + answer.tokens


def _is_of_kind(kind: str) -> Holds:
    if kind == CHAT:
        return lambda answer: answer.is_chat or answer.kind == CHAT
    if kind == UNSTREAMED:
        return lambda answer: not answer.is_streamed
    return lambda answer: answer.kind == kind


def _kinds_of(answers: Iterable[AnswerInUse]) -> list[str]:
    """Return the kinds of the given answers, with chats and answers that are not streamed as kinds of their
    own.
    """
    found = {answer.kind for answer in answers}
    found |= {CHAT for answer in answers if answer.is_chat}
    found |= {UNSTREAMED for answer in answers if not answer.is_streamed}
    return sorted(found)


def _has_context_from(least: int) -> Holds:
    return lambda answer: _context(answer) >= least


def _has_context_to(most: int) -> Holds:
    return lambda answer: _context(answer) <= most


def _has_m_between(lowest: float, highest: float) -> Holds:
    return lambda answer: lowest <= answer.m <= highest


def _of_kind(kind: str) -> str:
    return {
        CHAT: "in a chat",
        "stop": "with a stop string",
        "end": "that end by the end-of-sequence token",
        "logprobs": "with log-probabilities",
        "adjusted": "with penalties and a bias",
        "repetition": "with a repetition penalty",
        "truncated": "sampled with top-k, top-p or min-p",
        UNSTREAMED: "that are not streamed",
    }.get(kind, "of plain completions")


def _advice_on(kind: str) -> str:
    if kind == CHAT:
        return "the server makes another prompt of a conversation than the artifact's chat template does"
    return "look at what the server does otherwise for such requests"


def _range_of(answers: Iterable[AnswerInUse]) -> str:
    """Return the number of wrong answers, and the conditions that they were served under."""
    answers = list(answers)
    contexts, ms = sorted(map(_context, answers)), sorted(answer.m for answer in answers)
    beside = sum(answer.prompts_beside > 0 for answer in answers)
    return (
        f"{len(answers)} answers, with contexts of {contexts[0]} to {contexts[-1]} tokens, at an M of "
        f"{ms[0]:.1f} to {ms[-1]:.1f}, {beside} of them while prompts were read,"
    )
