"""Whether sampled tokens are drawn with the probabilities given by the artifact's logits and the temperature.

The test is a goodness of fit with a stated level: the summed surprisal, which another temperature moves most,
the spread of the tokens over their distributions, which top-k and top-p cut, and answers that do not change
with the seed.

A server rounds its logits in another order than this process. The effect of rounding in another order was
measured with 1,000 sampled tokens of the bundled model (640 in NVFP4), one run each. The effect moves the
surprisal z of 2,500 tokens by 0.001 (INT4), 0.02 (KVarN cache) and 0.12 (NVFP4 with 4-bit inputs). A z beyond
3.3 fails.
"""

import math
from collections.abc import Callable, Iterable, Sequence

from ...evidence.in_use import PIT_BINS, AnswerInUse, Draws
from ...evidence.verdict import CheckResult, CheckStatus, finite
from ...statistics.goodness_of_fit import chi_square, chi_square_chance, normal_chance

NAME = "sampling"
SURPRISAL_LEVEL = 0.001
"""The chance that sound draws fail by their summed surprisal, on either side. Half of the 0.2% in all are
spent here, since the sum tells a temperature that is off by 10% best; how often it does, and how often sound
draws fail, tests/bench/gate/sampling_characteristic.py counts."""
SPREAD_LEVEL = 0.0008
"""The chance that sound draws fail by their spread."""
SEEDS_LEVEL = 0.0002
"""The chance that sound draws fail by repeated answers. It is small, since real repetitions are long."""
EACH_LEVEL = 0.0002
"""The chance that sound draws fail by any one answer."""
FEWEST_DRAWN = 5 * PIT_BINS
"""The least number of drawn tokens: five in each bin, as a chi-square test needs (Cochran, 1954)."""
MOST_OF_GROUP = 6.0
"""The most standard deviations of the surprisal of a group of answers. The sum over so few tokens is not
quite normal in its tails, so the bound is far out: garbage of 200 tokens exceeds it at once."""
GROUPS: dict[str, Callable[[AnswerInUse], bool]] = {
    "further answers to requests for several": lambda answer: bool(answer.choice),
    "answers to requests for several": lambda answer: answer.choice is not None,
    "answers that are not streamed": lambda answer: not answer.is_streamed,
    "answers in chats": lambda answer: answer.is_chat,
}
"""A server has code of its own for each of these groups."""
OTHER_MODEL = 0.5
"""The relative error of the temperature beyond which another cause than the temperature is named."""
CUT = "unlikely tokens are not drawn: the server cuts distributions by top-k, top-p or min-p"


def check_sampling(answers: Sequence[AnswerInUse]) -> CheckResult:
    """Fail if tokens are surely drawn otherwise; unknown if there are no tokens, or the server does not
    report their ids.
    """
    level = SURPRISAL_LEVEL + SPREAD_LEVEL + SEEDS_LEVEL + EACH_LEVEL
    bound = f"at least as good a fit as {level:.1%} of sound servers show"
    drawn = [(answer, answer.draws) for answer in answers if answer.draws is not None]
    if not drawn:
        reason = "no sampled answers were asked for, or the artifact's server does not tell their token ids"
        return CheckResult(NAME, "unknown", "not told", bound, reason)
    draws = _sum(draws for _, draws in drawn)
    if draws.tokens < FEWEST_DRAWN:
        reason = f"{draws.tokens} sampled tokens tell nothing; {FEWEST_DRAWN} would"
        return CheckResult(NAME, "inconclusive", f"{draws.tokens} tokens", bound, reason)
    z = _z(draws)
    spread = chi_square(draws.bins)
    surprisal_chance, spread_chance = normal_chance(z), chi_square_chance(spread, PIT_BINS - 1)
    repeating, seeds_chance = _repeating([answer for answer, _ in drawn])
    off = sum(answer.off for answer, _ in drawn)
    problems = []
    if seeds_chance < SEEDS_LEVEL:
        problems.append(_alike([answer for answer, _ in drawn], repeating))
    if (of_group := _only_one_group(drawn)) is not None:
        problems.append(of_group)
    # NaN is no fit.
    elif not surprisal_chance >= SURPRISAL_LEVEL:
        problems.append(_another_source(draws, off))
    elif not spread_chance >= SPREAD_LEVEL:
        problems.append(_uneven(draws))
    elif strange := _strange([answer for answer, _ in drawn]):
        problems.append(
            f"{len(strange)} of {len(drawn)} answers, such as {strange[0].beginning!r}, are surely not drawn "
            "from their own distributions: look for answers to another prompt, or choices that are mixed up"
        )
    status: CheckStatus = "fail" if problems else "pass"
    return CheckResult(
        name=NAME,
        status=status,
        measured=f"{draws.tokens} tokens: z = {z:+.1f} of their surprisal, χ² = {spread:.0f} of their spread",
        bound=bound,
        reason="; ".join(problems)
        or f"every token of {len(drawn)} sampled answers was compared with its distribution computed here",
        figures={
            "answers": len(drawn),
            "tokens": draws.tokens,
            "z": finite(z),
            "surprisal_chance": finite(surprisal_chance),
            "chi_square": spread,
            "spread_chance": spread_chance,
            "repeating_answers": repeating,
        },
    )


def _only_one_group(drawn: Sequence[tuple[AnswerInUse, Draws]]) -> str | None:
    """The reason if one group of answers does not fit and all others do; None if there is none."""
    largest, reason = 0.0, None
    for words, holds in GROUPS.items():
        group = [(answer, draws) for answer, draws in drawn if holds(answer)]
        others = [draws for answer, draws in drawn if not holds(answer)]
        if not group or not others:
            continue
        draws = _sum(draws for _, draws in group)
        z = _z(draws)
        # NaN is no fit.
        if abs(z) < MOST_OF_GROUP or abs(z) <= largest or normal_chance(_z(_sum(others))) < SURPRISAL_LEVEL:
            continue
        cause = _another_source(draws, sum(answer.off for answer, _ in group))
        if all(answer.choice is not None for answer, _ in group):
            cause = "choices of one request are mixed up, or answer another prompt"
        largest = abs(z)
        reason = f"only the {len(group)} {words} do not fit, with z = {z:+.1f}: {cause}"
    return reason


def _sum(several: Iterable[Draws]) -> Draws:
    several = list(several)
    return Draws(
        tokens=sum(draws.tokens for draws in several),
        nats=math.fsum(draws.nats for draws in several),
        surprisal=math.fsum(draws.surprisal for draws in several),
        variance=math.fsum(draws.variance for draws in several),
        bins=tuple(map(sum, zip(*(draws.bins for draws in several), strict=True))),
    )


def _z(draws: Draws) -> float:
    """Return the standard deviations by which the summed surprisal differs from 0.

    The surprisal of a token minus the entropy of its distribution has mean 0, whatever came before it. The
    sum is therefore a martingale whose variance is the sum of variances, and is normal for this many tokens
    (Brown, 1971).
    """
    if draws.variance > 0:
        return draws.surprisal / math.sqrt(draws.variance)
    return math.copysign(math.inf, draws.surprisal) if draws.surprisal else 0.0


def _repeating(answers: Sequence[AnswerInUse]) -> tuple[int, float]:
    """Return how many answers repeat an earlier answer to their prompt with another seed, and a limit for the
    chance of that.

    A text of probability p or less is drawn twice with a chance of at most p, for any two answers; for n
    answers beside earlier ones, at most n (n + 1) / 2 pairs share a prompt.
    """
    beside = [answer for answer in answers if answer.repeats_other_seed is not None]
    repeating = [answer.draws.nats for answer in beside if answer.repeats_other_seed and answer.draws]
    if not repeating:
        return 0, 1.0
    pairs = len(beside) * (len(beside) + 1) / 2
    return len(repeating), min(1.0, pairs * math.exp(-max(repeating)))


def _strange(answers: Sequence[AnswerInUse]) -> list[AnswerInUse]:
    """Return the answers that are far more likely at twice the temperature.

    Drawn tokens are 1/a times as likely under any other distribution with a chance of a at most, since the
    ratio of both likelihoods has mean 1 (Ville, 1939). Unlike sums of surprisals, this holds for the few
    tokens of one answer. A wrong answer has many unlikely tokens, which are less so at twice the temperature.
    """
    most = math.log(len(answers) / EACH_LEVEL)
    return [
        answer
        for answer in answers
        if answer.draws is not None
        and answer.draws.hotter_nats is not None
        and answer.draws.nats - answer.draws.hotter_nats > most
    ]


def _alike(answers: Sequence[AnswerInUse], repeating: int) -> str:
    """Return the reason if answers repeat an earlier one."""
    beside = [answer for answer in answers if answer.repeats_other_seed is not None]
    if all(answer.choice is not None for answer in beside if answer.repeats_other_seed):
        several = sum(answer.choice is not None for answer in beside)
        return (
            f"{repeating} of {several} further choices of a request equal an earlier one: one is told again"
        )
    return (
        f"{repeating} of {len(beside)} answers equal an earlier one to the same prompt with another seed: "
        "seeds have no effect"
    )


def _another_source(draws: Draws, off: int) -> str:
    """Return the distribution that the tokens seem to be drawn from.

    To first order, a temperature T' in the place of T moves the expected surprisal by
    variance * (T' - T) / T: the expectation of -log p changes so along the distributions p^(T / T').
    """
    if not off:
        return "every token is the most likely one: the temperature is ignored"
    nats = draws.surprisal / draws.tokens
    error = draws.surprisal / draws.variance if draws.variance > 0 else math.copysign(math.inf, nats)
    if not abs(error) <= OTHER_MODEL:
        return (
            f"tokens have {nats:+.2f} nats beside the entropy of their distributions: they are drawn from "
            "other logits than the artifact's, or changed on their way"
        )
    if _is_cut(draws):
        return CUT
    more = "higher" if error > 0 else "lower"
    return f"tokens are drawn as if the temperature were {abs(error):.0%} {more} than was asked for"


def _is_cut(draws: Draws) -> bool:
    """Say whether the least likely tokens are missing; a wrong temperature only makes such tokens a little
    rarer.
    """
    return draws.surprisal < 0 and draws.bins[-1] < draws.tokens / PIT_BINS / 2


def _uneven(draws: Draws) -> str:
    if _is_cut(draws):
        return CUT
    expected = draws.tokens / PIT_BINS
    at = max(range(PIT_BINS), key=lambda index: abs(draws.bins[index] - expected))
    return (
        f"{draws.bins[at]} tokens instead of {expected:.0f} are in part {at + 1} of {PIT_BINS} of their "
        "distributions, ordered from the most likely token on: look at how the server draws"
    )
