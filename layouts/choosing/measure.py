"""Times every layout on one problem; `choose.py` chooses by the figures.

A layout is timed as a decode step calls it, a module on x [M, 1, K], against the unquantized module. The
layout's result is checked in the same run: a kernel that is wrong on this device is refused, however fast it
is.
"""

import time
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from ..packing.layout import LAYOUTS, AnyLayout, PackedWeight, Problem
from .plan import Measurement
from .subject import Subject, subject_of
from .time_limit import OutOfTime, time_limit
from .timing import TimingBudget, interleaved_microseconds

MAX_ERROR = 0.02
"""Relative L2 against the float32 product; an honest bfloat16 kernel stays below 0.004."""

CUDA_SAMPLES, CPU_SAMPLES = 16, 32
CPU_CACHE_BYTES = 4 << 20
CPU_MEMORY_BYTES = 256 << 20
CUDA_MEMORY_FRACTION = 0.25
MAX_COPIES = 64


@dataclass
class ShapeMeasurements:
    """All measurements and refusals for one problem."""

    measurements: list[Measurement] = field(default_factory=list)
    refusals: dict[str, str] = field(default_factory=dict)


def measure(
    problem: Problem,
    ms: Sequence[int],
    layouts: Sequence[str],
    budget: TimingBudget | None = None,
    on_measured: Callable[[int], object] = lambda m: None,
    allowance: MutableMapping[str, float] | None = None,
    longest: float = float("inf"),
) -> ShapeMeasurements:
    """Time the named layouts at every M, all in turn in one run; layouts that cannot serve are refused.

    allowance: the seconds that each layout has left for packing and running every M once. They are reduced by
               what a layout takes here, to 0 if it was not ready in time. A layout not named has no limit
    longest:   the most seconds of this allowance that a layout may take for this problem
    """
    allowance = {} if allowance is None else allowance
    budget = budget or TimingBudget(samples=CUDA_SAMPLES if problem.device.type == "cuda" else CPU_SAMPLES)
    found = ShapeMeasurements()
    subject = subject_of(problem, max(ms))

    usable: dict[str, PackedWeight] = {}
    for name in layouts:
        packed, refusal = None, LAYOUTS[name].refuses(problem)
        if refusal is None:
            prepare = partial(_pack_and_check, LAYOUTS[name], subject, ms)
            packed, refusal = _within(allowance, longest, name, prepare)
        if packed is not None:
            usable[name] = packed
        if refusal is not None:
            found.refusals[name] = refusal

    smallest = min((packed.nbytes for packed in usable.values()), default=1 << 62)
    copies = copies_past_the_cache(problem, smallest)
    contestants = {
        f"unquantized {packed.layout}": [_copy(packed) for _ in range(copies)]
        for packed in subject.baselines()
    }
    baselines = tuple(contestants)
    contestants |= {name: [_copy(packed) for _ in range(copies)] for name, packed in usable.items()}

    def refuse(name: str, error: Exception) -> None:
        if name not in baselines:
            found.refusals[name] = _failed(error)
        del contestants[name]

    for m in ms:
        calls = {name: subject.call(packed, m) for name, packed in contestants.items()}
        with torch.inference_mode():
            turns = max(copies, subject.draws)
            times = interleaved_microseconds(calls, turns, problem.device, budget, refuse)
        best = min(times[name] for name in baselines if name in times)
        found.measurements += [
            Measurement(name, LAYOUTS[name].kernel, m, times[name], best)
            for name in contestants
            if name not in baselines
        ]
        on_measured(m)
    # A layout that fails at one M is refused at all of them.
    found.measurements = [each for each in found.measurements if each.layout not in found.refusals]
    return found


def copies_past_the_cache(problem: Problem, smallest_bytes: int) -> int:
    """Return how many copies of the weight the calls use in turn; the number is the same for every
    contestant.

    A decode step goes through all layers of a model, so a weight is seldom in the nearest cache. On CUDA, the
    copies of the smallest packing take twice the L2 cache. On a CPU, they take more than the cores' own L2
    caches but may fit in the last cache, as a small model does while it is served. There is at least one
    copy, and there are no more copies than memory allows.
    """
    experts = problem.experts.count if problem.experts else 1
    dense_bytes = experts * problem.n * problem.k * problem.dtype.itemsize
    if problem.device.type == "cuda":
        cache = 2 * torch.cuda.get_device_properties(problem.device).L2_cache_size
        memory = int(torch.cuda.mem_get_info(problem.device)[0] * CUDA_MEMORY_FRACTION)
    else:
        cache, memory = CPU_CACHE_BYTES, CPU_MEMORY_BYTES
    wanted = -(-cache // smallest_bytes)
    return max(1, min(wanted, memory // (3 * dense_bytes), MAX_COPIES))


Prepared = tuple[PackedWeight | None, str | None]
"""The packed weight, or None and the reason for which the layout cannot be used here."""


def _within(
    allowance: MutableMapping[str, float], longest: float, name: str, prepare: Callable[[], Prepared]
) -> Prepared:
    """Return the result of `prepare`, or a refusal if it takes longer than the layout's remaining
    allowance.
    """
    if name not in allowance:
        return prepare()
    late = None, "not ready in time here: it compiles or tunes for longer than a choice may take"
    if allowance[name] <= 0:
        return late
    started = time.monotonic()
    try:
        with time_limit(min(longest, allowance[name])):
            prepared = prepare()
    except OutOfTime:
        allowance[name] = 0.0
        return late
    allowance[name] -= time.monotonic() - started
    return prepared


def _pack_and_check(layout: AnyLayout, subject: Subject, ms: Sequence[int]) -> Prepared:
    try:
        packed = subject.pack(layout)
        for m in ms:
            expected = subject.expected(m)
            y = subject.call([packed], m)(0).float().reshape(expected.shape)
            error = ((y - expected).norm() / expected.norm()).item()
            if not error <= MAX_ERROR:
                return None, f"wrong answer here: relative error {error:.3g} at M={m}"
    except Exception as raised:
        return None, _failed(raised)
    return packed, None


def _failed(error: Exception) -> str:
    """Return the reason for refusing a layout whose kernel raised `error`, which third-party kernels may
    do.
    """
    message = str(error).splitlines() or [""]
    return f"failed here: {type(error).__name__}: {message[0][:200]}"


def _copy(packed: PackedWeight) -> PackedWeight:
    return replace(packed, tensors={name: tensor.clone() for name, tensor in packed.tensors.items()})
