"""Random times and lengths: Poisson arrivals, log-uniform lengths, lengths within a budget.

`use_plan.py` makes requests with the drawn times and lengths.
"""

import bisect
import random
from collections.abc import Sequence


def poisson_times(
    generator: random.Random, seconds: float, first_rate: float, last_rate: float, least: int
) -> list[float]:
    """Return the times of a Poisson process whose rate changes linearly over `seconds`.

    The process is drawn at the highest rate and thinned. Further times, up to `least`, are drawn from the
    same density.
    """
    highest = max(first_rate, last_rate)

    def is_kept(at: float) -> bool:
        rate = first_rate + (last_rate - first_rate) * at / seconds
        return generator.random() * highest < rate

    times: list[float] = []
    at = generator.expovariate(highest)
    while at < seconds:
        if is_kept(at):
            times.append(at)
        at += generator.expovariate(highest)
    while len(times) < least:
        at = generator.uniform(0.0, seconds)
        if is_kept(at):
            times.append(at)
    return times


def lengths_within(budget: int, generator: random.Random, count: int, least: int, longest: int) -> list[int]:
    """Return log-uniform lengths from `least` to below `longest`, or to a lower limit if their sum would
    exceed `budget`."""
    uniforms = stratified(generator, count)
    # The largest bound whose lengths can be paid; their sum rises with it.
    paid = bisect.bisect_right(
        range(least + 1, longest + 1), budget, key=lambda most: sum(log_uniform(uniforms, least, most))
    )
    return log_uniform(uniforms, least, least + paid)


def log_uniform(uniforms: Sequence[float], least: int, most: int) -> list[int]:
    """Return log-uniform whole numbers from `least` to below `most`, made from uniform numbers from 0 to
    below 1.
    """
    return [int(least * (most / least) ** uniform) for uniform in uniforms]


def stratified(generator: random.Random, count: int) -> list[float]:
    """Return uniform numbers from 0 to below 1, one from each of `count` equal parts, so that blocks have
    equal work."""
    uniforms = [(part + generator.random()) / count for part in range(count)]
    generator.shuffle(uniforms)
    return uniforms
