"""The requests of a profile of loads, mixed in one batch; the lengths of prompts and answers follow a trace.

Requests come at random times, at a rate that leaves the baseline time between prompts, so that decoding shows
by itself. Requests of all kinds are in `use_plan.py`.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from ..profiles import Profile
from .drawing import poisson_times, stratified
from .planned_request import PlannedRequest
from .prompts import Slices
from .use_plan import LEAST_PROMPT

LOAD = 0.6
"""The load as a share of the requests that the baseline can answer in the same time."""
LEAST_REQUESTS = 12
"""The least number of requests in a block: the distribution is cut into as many parts, one length from
each."""
LEAST_ANSWER = 4
"""The least number of tokens in an answer: fewer have hardly any gap between chunks."""


@dataclass(frozen=True)
class ProfileShape:
    """The numbers from which one block's requests are drawn, besides a seed and a text."""

    requests: int
    seconds: float
    """Seconds over which the requests arrive."""
    scale: float
    """The factor applied to the trace's lengths, 0 to 1."""


def shape_of_profile(
    profile: Profile,
    seconds: float,
    prompt_speed: float,
    answer_speed: float,
    context: int,
    longest_prompt: int,
) -> ProfileShape:
    """Plan as many requests as come in `seconds`; all lengths are shorter by one factor, if the context does
    not hold them or if `LEAST_REQUESTS` of them would take longer.

    prompt_speed, answer_speed: tokens per second that the baseline reads, and that it writes at its best M
    longest_prompt: the most tokens that a prompt cut from the text can have
    """
    work = profile.prompts.mean / prompt_speed + profile.answers.mean / answer_speed
    requests = int(max(LEAST_REQUESTS, seconds * LOAD / work))
    scale = min(
        1.0,
        context / profile.longest_request,
        longest_prompt / profile.prompts.longest,
        seconds * LOAD / (work * requests),
    )
    return ProfileShape(requests, requests * scale * work / LOAD, scale)


def plan_profile(
    seed: int, profile: Profile, shape: ProfileShape, text: Sequence[int]
) -> list[PlannedRequest]:
    """Return the requests of one block, by arrival; the same arguments give the same requests.

    text: token ids that prompts are cut from
    """
    generator = random.Random(seed)
    count, rate = shape.requests, shape.requests / shape.seconds
    times = poisson_times(generator, shape.seconds, rate, rate, count)
    slices = Slices(generator, text, LEAST_PROMPT)
    lengths = (stratified(generator, count) for _ in range(2))
    return [
        PlannedRequest(
            at,
            "greedy",
            tuple(slices.cut(max(LEAST_PROMPT, int(shape.scale * profile.prompts.at(prompt))))),
            max(LEAST_ANSWER, int(shape.scale * profile.answers.at(answer))),
        )
        for at, prompt, answer in zip(sorted(generator.sample(times, count)), *lengths, strict=True)
    ]
