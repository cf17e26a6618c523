"""Measuring every layout on one problem: the figures a choice is made from.

A layout is timed as a decode step calls it, a module on x [M, 1, K], beside the unquantized module. Its
answer is checked in the same run, so a kernel that is wrong on this device is refused, however quick.
"""

import time
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from .int4 import Int4Weight
from .layout import LAYOUTS, Layout, PackedWeight, Problem, QuantizedWeight
from .linear import QuantizedLinear
from .nvfp4 import GROUP_SIZE, NVFP4Weight
from .plan import Measurement
from .time_limit import OutOfTime, time_limit
from .timing import Call, TimingBudget, interleaved_microseconds

BASELINE = "unquantized"
MAX_ERROR = 0.02
"""Relative L2 against the float32 product; an honest bfloat16 kernel stays below 0.004."""

CUDA_SAMPLES, CPU_SAMPLES = 16, 32
CPU_CACHE_BYTES = 4 << 20
CPU_MEMORY_BYTES = 256 << 20
CUDA_MEMORY_FRACTION = 0.25
MAX_COPIES = 64


@dataclass
class ShapeMeasurements:
    """Everything measured on one problem."""

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
    """Time the named layouts at every M, each M in one interleaved run; what cannot serve is refused.

    allowance: seconds that layouts may take to pack and to meet every M, less what they have taken, and none
               once they were not ready; a layout that is not named has no limit
    longest:   seconds of it that a layout may take here
    """
    allowance = {} if allowance is None else allowance
    budget = budget or TimingBudget(samples=CUDA_SAMPLES if problem.device.type == "cuda" else CPU_SAMPLES)
    found = ShapeMeasurements()
    weight = random_weight(problem)
    x = torch.randn(max(ms), 1, problem.k, device=problem.device).to(problem.dtype)
    dense = weight.dequantize(torch.float32)
    expected = x.float() @ dense.T

    usable: dict[str, PackedWeight] = {}
    for name in layouts:
        refusal = LAYOUTS[name].refuses(problem)
        if refusal is None:
            prepare = partial(_pack_and_check, LAYOUTS[name], weight, x, expected, ms)
            packed, refusal = _within(allowance, longest, name, prepare)
            if packed is not None:
                usable[name] = packed
        if refusal is not None:
            found.refusals[name] = refusal

    smallest = min((one.nbytes for one in usable.values()), default=1 << 62)
    copies = range(copies_past_the_cache(problem, smallest))
    modules: dict[str, list[nn.Module]] = {BASELINE: [_linear(dense.to(problem.dtype)) for _ in copies]}
    for name, one in usable.items():
        modules[name] = [QuantizedLinear(_copy(one), None) for _ in copies]
    del dense

    def refuse(name: str, error: Exception) -> None:
        found.refusals[name] = _failed(error)
        del modules[name]

    for m in ms:
        calls = {name: _rotating(rotated, x[:m]) for name, rotated in modules.items()}
        with torch.inference_mode():
            times = interleaved_microseconds(calls, len(copies), problem.device, budget, refuse)
        for name in modules:
            if name != BASELINE:
                figures = times[name], times[BASELINE]
                found.measurements.append(Measurement(name, LAYOUTS[name].kernel, m, *figures))
        on_measured(m)
    # A layout that served some Ms and failed at one does not serve.
    found.measurements = [one for one in found.measurements if one.layout not in found.refusals]
    return found


def random_weight(problem: Problem) -> QuantizedWeight:
    """A weight of the problem's format and shape on its device; the codes are uniform, speed asks no more."""
    n, k, device = problem.n, problem.k, problem.device
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device=device)
    if problem.weight_format is NVFP4Weight:
        scale = torch.rand(n, k // GROUP_SIZE, device=device).add(0.5).to(torch.float8_e4m3fn)
        return NVFP4Weight(codes, scale, torch.tensor(0.01, device=device))
    groups = k // problem.group_size
    scale = (torch.rand(n, groups, device=device) + 0.5).mul(0.01).to(torch.bfloat16)
    if problem.integer_zero:
        zero = torch.randint(0, 16, (n, groups), dtype=torch.uint8, device=device)
    else:
        zero = torch.rand(n, groups, device=device).mul(15)
    return Int4Weight(codes, scale, zero, problem.group_size)


def copies_past_the_cache(problem: Problem, smallest_bytes: int) -> int:
    """How many copies of the weight to rotate through, the same number for every contestant.

    A decode step walks through all of a model's layers, so it seldom finds a weight in the nearest cache. On
    CUDA: enough that the smallest packing overflows L2 twice. On a CPU whose last cache holds a small model
    whole, as it does in serving: enough to overflow the cores' own L2. Bounded by memory, at least one.
    """
    dense_bytes = problem.n * problem.k * problem.dtype.itemsize
    if problem.device.type == "cuda":
        cache = 2 * torch.cuda.get_device_properties(problem.device).L2_cache_size
        memory = int(torch.cuda.mem_get_info(problem.device)[0] * CUDA_MEMORY_FRACTION)
    else:
        cache, memory = CPU_CACHE_BYTES, CPU_MEMORY_BYTES
    wanted = -(-cache // smallest_bytes)
    return max(1, min(wanted, memory // (3 * dense_bytes), MAX_COPIES))


Prepared = tuple[PackedWeight | None, str | None]
"""The packed weight, and why a layout cannot be used here if it cannot."""


def _within(
    allowance: MutableMapping[str, float], longest: float, name: str, prepare: Callable[[], Prepared]
) -> Prepared:
    """What `prepare` gives, if it is done within what is left of the layout's allowance."""
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


def _pack_and_check(
    layout: Layout, weight: QuantizedWeight, x: Tensor, expected: Tensor, ms: Sequence[int]
) -> Prepared:
    try:
        packed = layout.pack(weight, x.dtype)
        module = QuantizedLinear(packed, None)
        for m in ms:
            y = module(x[:m]).float()
            error = ((y - expected[:m]).norm() / expected[:m].norm()).item()
            if not error <= MAX_ERROR:
                return None, f"wrong answer here: relative error {error:.3g} at M={m}"
    except Exception as raised:
        return None, _failed(raised)
    return packed, None


def _failed(error: Exception) -> str:
    """Other people's kernels fail in their own ways; the choice goes on without them, and says so."""
    message = str(error).splitlines() or [""]
    return f"failed here: {type(error).__name__}: {message[0][:200]}"


def _rotating(modules: Sequence[nn.Module], x: Tensor) -> Call:
    return lambda copy: modules[copy](x)


def _linear(weight: Tensor) -> nn.Linear:
    n, k = weight.shape
    linear = nn.Linear(k, n, bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear


def _copy(packed: PackedWeight) -> PackedWeight:
    tensors = {name: tensor.clone() for name, tensor in packed.tensors.items()}
    return PackedWeight(packed.layout, packed.shape, packed.dtype, tensors, packed.meta)
