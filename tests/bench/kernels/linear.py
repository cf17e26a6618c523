"""Times every registered layout that serves a problem beside the unquantized product, on real models' shapes.

    python -P tests/bench/kernels/linear.py --model qwen3-8b --out OUT/linear.json
    python -P tests/bench/kernels/linear.py --format nvfp4 --layouts nvfp4_swap_ab,humming
    python -P tests/bench/kernels/linear.py --format int8 --layouts int8_swap_ab,gpu_dequantized
    python -P tests/bench/kernels/linear.py --format fp8 --layouts fp8_scaled,fp8_scaled_invariant
    python -P tests/bench/kernels/linear.py --format int4-fp8 --layouts int4_fp8 --m 1,16,64,256,1024,4096
    python -P tests/bench/kernels/linear.py --format int4-fp8 --layouts int4_fp8,vllm_w4a8 --vllm FOLDER
    python -P tests/bench/kernels/linear.py --format fp8-block --model deepseek-v3 --vllm FOLDER

Layouts that compile for each shape or M do so beforehand (`compile_ahead.py`); one that fails or takes longer
than it is given is named, in what is printed and in the JSON, and the others go on. Weights are rotated past
the L2 cache, calls run in CUDA graphs, figures are medians of interleaved samples. In the same run each
layout's answer, into poisoned memory, is compared with float64 on fresh random data. Not for whole models:
that is `engine.py`.
"""

import argparse
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from scalegate.base.atomic_files import write_json
from scalegate.layouts.choosing.timing import HOPELESS, TimingBudget, interleaved_microseconds
from scalegate.layouts.formats.fp8 import BLOCKS, FP8
from scalegate.layouts.formats.input_format import dynamic_input
from scalegate.layouts.formats.int4 import Int4, Int4Weight, pack_nibbles
from scalegate.layouts.formats.int8 import INT8_INPUTS, WHOLE_ROW, Int8
from scalegate.layouts.formats.nvfp4 import NVFP4
from scalegate.layouts.formats.weight_format import Weight, WeightFormat
from scalegate.layouts.packing.all_layouts import LAYOUTS
from scalegate.layouts.packing.fp8_scaled import FP8Scaled, Int8Inputs
from scalegate.layouts.packing.hopper import HopperLayout
from scalegate.layouts.packing.int4_fp8 import Int4FP8
from scalegate.layouts.packing.layout import Layout, PackedWeight, Problem, rounds_inputs
from scalegate.layouts.packing.portable import PortableLayout
from scalegate.tests.bench.engine.compile_ahead import Job, compile_ahead, tune_for
from scalegate.tests.bench.kernels import vllm_layouts
from torch import Tensor
from torch.nn import functional

MODELS = {
    "qwen3-8b": {
        "qkv": (6144, 4096),
        "o": (4096, 4096),
        "gate_up": (24576, 4096),
        "down": (4096, 12288),
    },
    "qwen3-4b": {"qkv": (6144, 2560), "o": (2560, 4096), "gate_up": (19456, 2560), "down": (2560, 9728)},
    "llama3-70b": {
        "qkv": (10240, 8192),
        "o": (8192, 8192),
        "gate_up": (57344, 8192),
        "down": (8192, 28672),
    },
    "qwen3-30b-a3b": {"qkv": (5120, 2048), "o": (2048, 4096)},
    "deepseek-v3": {
        "o": (7168, 16384),
        "gate_up": (4096, 7168),
        "down": (7168, 2048),
        "q_b": (24576, 1536),
        "kv_b": (32768, 512),
        "qkv_a": (2112, 7168),
    },
}
ROTATED_BYTES = 300e6
BASELINE = "unquantized"
MAX_ERROR, OTHERS_MAX_ERROR = 4e-3, 1e-2
"""Relative; other people's kernels are compared, not guaranteed."""
SLOW_FROM = 512
"""A layout more than `HOPELESS` times behind at some M is not timed from here on: that would take minutes."""
OURS = {
    "int4": "swap_ab", "int8": "int8_swap_ab", "nvfp4": "nvfp4_swap_ab", "fp8": "fp8_scaled",
    "fp8-block": "fp8_scaled", "int4-fp8": "int4_fp8",
    "int8-w8a8": "int8_inputs",
}  # fmt: skip
"""By format, what is compared with the best other."""
COMPILING_BY_SHAPE, COMPILING_BY_M = "humming", "gemlite"
"""Layouts whose packages compile for each shape, for all M at once; for each M, for all shapes alike."""


def int4(group_size: int, fractional: bool) -> Int4:
    return Int4(group_size, zero_point="fractional" if fractional else "integer")


def random_int4(n: int, k: int, group_size: int, fractional: bool, device: torch.device) -> Int4Weight:
    spec = int4(group_size, fractional)
    codes = pack_nibbles(torch.randint(0, 16, (n, k), dtype=torch.uint8, device=device))
    groups = (n, spec.groups(k))
    scale = (torch.rand(groups, device=device) * 0.02 + 0.001).to(torch.bfloat16)
    if fractional:
        return Int4Weight(spec, codes, scale, torch.rand(groups, device=device) * 15)
    zero = torch.randint(0, 16, groups, dtype=torch.uint8, device=device)
    return Int4Weight(spec, codes, scale, zero)


def random_weight(spec: WeightFormat, n: int, k: int, device: torch.device) -> Weight:
    if isinstance(spec, Int4) and not spec.symmetric:
        return random_int4(n, k, spec.group_size, not spec.has_integer_zero, device)
    return spec.random(n, k, device)


def exact_weight(weight: Weight) -> Tensor:
    """The weight in float64, from the definition."""
    if not isinstance(weight, Int4Weight):
        return weight.dequantize(torch.float64)
    (n, k), size = weight.shape, weight.spec.group_size
    codes = torch.stack((weight.codes & 0xF, weight.codes >> 4), -1).view(n, -1, size).double()
    return ((codes - weight.zero_point.double()[..., None]) * weight.scale.double()[..., None]).view(n, k)


def checked_error(layout: Layout, packed: PackedWeight, x: Tensor, expected: Tensor) -> float:
    """Relative error of the worse of two runs into poisoned memory; infinite where bits of ours differ."""
    answers = []
    for _ in range(2):
        poison = torch.full(expected.shape, math.nan, dtype=x.dtype, device=x.device)
        del poison  # the allocator hands the same memory to the answer
        answers.append(layout.matmul(x, packed))
    if is_ours(layout.name) and not torch.equal(answers[0], answers[1]):
        return math.inf
    errors = [(answer.double() - expected).norm() / expected.norm() for answer in answers]
    return float(torch.stack(errors).max())  # not a number where one of them is not


def copies_of(packed: PackedWeight, count: int) -> list[PackedWeight]:
    return [packed] + [
        replace(packed, tensors={name: tensor.clone() for name, tensor in packed.tensors.items()})
        for _ in range(count - 1)
    ]


def multiply_by(layout: Layout, copies: list[PackedWeight], x: Tensor) -> Callable[[int], Tensor]:
    return lambda i: layout.matmul(x, copies[i % len(copies)])


def multiply_dense(copies: list[Tensor], x: Tensor) -> Callable[[int], Tensor]:
    return lambda i: functional.linear(x, copies[i % len(copies)])


def problem_of(spec: WeightFormat, n: int, k: int, device: torch.device) -> Problem:
    return Problem(spec, n, k, torch.bfloat16, device)


def is_ours(name: str) -> bool:
    return isinstance(LAYOUTS[name], HopperLayout | PortableLayout | FP8Scaled | Int4FP8 | Int8Inputs)


@dataclass
class Patience:
    """How long a layout may take for its first call at a shape and M, all of them together."""

    seconds: float
    spent: dict[str, float] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    """By "layout NxK M=M", the reason."""

    def allows(self, name: str, place: str) -> bool:
        if self.spent.get(name, 0.0) > self.seconds:
            self.leave_out(name, place, f"had its {self.seconds:.0f} s of first calls before")
        return f"{name} {place}" not in self.left_out

    def leave_out(self, name: str, place: str, why: str) -> None:
        self.left_out[f"{name} {place}"] = why
        print(f"{place}: {name} left out: {why}", flush=True)

    def failed(self, place: str, name: str, error: Exception) -> None:
        """Other people's kernels may fail; ours must not."""
        if is_ours(name):
            raise error
        self.leave_out(name, place, f"failed: {type(error).__name__}: {str(error)[:200]}")

    def note(self, name: str, seconds: float) -> None:
        self.spent[name] = self.spent.get(name, 0.0) + seconds


def packed_copies(weight: Weight, problem: Problem, names: list[str]) -> dict[str, list[PackedWeight]]:
    """Copies of the weight in each layout that serves the problem, as many as rotate through the caches."""
    packed = {}
    for name in names:
        refusal = LAYOUTS[name].refuses(problem)
        if refusal is not None:
            print(f"{problem.n}x{problem.k}: {name} refuses: {refusal}", flush=True)
            continue
        copy = LAYOUTS[name].pack(weight, torch.bfloat16)
        packed[name] = copies_of(copy, max(2, int(ROTATED_BYTES // copy.nbytes)))
    return packed


def measure_shape(
    spec: WeightFormat,
    n: int,
    k: int,
    ms: list[int],
    names: list[str],
    patience: Patience,
    device: torch.device,
) -> list[dict[str, Any]]:
    weight = random_weight(spec, n, k, device)
    exact = exact_weight(weight)
    allowed = [name for name in names if any(patience.allows(name, f"{n}x{k} M={m}") for m in ms)]
    packed = packed_copies(weight, problem_of(spec, n, k, device), allowed)
    count = max(2, int(ROTATED_BYTES // (2 * n * k)))
    dense = [exact.to(torch.bfloat16)] + [
        torch.randn(n, k, device=device, dtype=torch.bfloat16) for _ in range(count - 1)
    ]
    rows: list[dict[str, Any]] = []
    hopeless: set[str] = set()
    for turn, m in enumerate([ms[0], *ms]):  # the first figures on a cold chip are thrown away
        place = f"{n}x{k} M={m}"
        x = torch.randn(m, k, device=device, dtype=torch.bfloat16)
        rounding = dynamic_input(spec)
        inputs = x.float() if rounding is None else rounding.round(x.float())
        expected = inputs.double() @ exact.T
        calls = {BASELINE: multiply_dense(dense, x)}
        errors = {}
        leave_out = partial(patience.failed, place)
        for name, copies in packed.items():
            if not patience.allows(name, place):
                continue
            if m >= SLOW_FROM and name in hopeless:
                patience.leave_out(name, place, f"more than {HOPELESS:.0f} times behind at fewer rows")
                continue
            started = time.perf_counter()
            try:
                given = x if rounds_inputs(LAYOUTS[name]) else inputs.to(x.dtype)
                errors[name] = checked_error(LAYOUTS[name], copies[0], given, expected)
            except Exception as error:
                leave_out(name, error)
                continue
            patience.note(name, time.perf_counter() - started)
            calls[name] = multiply_by(LAYOUTS[name], copies, x)
        graph_calls = max([len(dense), *(len(packed[name]) for name in calls if name in packed)])
        budget = TimingBudget(samples=16, seconds=1.0)
        times = interleaved_microseconds(
            calls, graph_calls if m < SLOW_FROM else 3, device, budget, leave_out
        )
        behind = {name for name, us in times.items() if us > HOPELESS * times[BASELINE]}
        hopeless |= {name for name in behind if not is_ours(name)}
        if turn:
            rows.append({"m": m, "microseconds": times, "errors": errors})
            figures = "  ".join(f"{name} {us:.1f}" for name, us in times.items())
            print(f"{place}: {figures}", flush=True)
    return rows


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def print_tables(results: dict[str, list[dict]], ms: list[int], names: list[str], ours: str) -> bool:
    """One table a shape and one of geometric means; False where an answer was wrong."""
    right = True
    head = "".join(f"{f'M={m}':>12}" for m in ms)
    for shape, rows in results.items():
        print(f"\n{shape:<30}{head}")
        print(f"{BASELINE:<30}" + "".join(f"{row['microseconds'][BASELINE]:12.1f}" for row in rows))
        for name in names:
            cells = []
            for row in rows:
                us = row["microseconds"].get(name)
                cells.append(f"{us:6.1f} {row['microseconds'][BASELINE] / us:4.2f}x" if us else "left out")
                right &= row["errors"].get(name, 0.0) <= bound_of(name)
            print(f"{name:<30}" + "".join(f"{cell:>12}" for cell in cells))
        if ours in names:
            beside = "".join(f"{beside_others(row, ours):>12}" for row in rows)
            print(f"{ours + ', best other = 1':<30}{beside}")
    print(f"\n{'geometric mean of ratios':<30}{head}")
    for name in names:
        cells = []
        for i in range(len(ms)):
            times = [rows[i]["microseconds"] for rows in results.values()]
            whole = all(name in t for t in times)
            cells.append(f"{geometric_mean([t[BASELINE] / t[name] for t in times]):.3f}" if whole else "-")
        print(f"{name:<30}" + "".join(f"{cell:>12}" for cell in cells))
    print()
    for name in names:
        worst = max(row["errors"].get(name, 0.0) for rows in results.values() for row in rows)
        print(f"{name}: worst relative error {worst:.2e}, bound {bound_of(name):.0e}")
    print("right" if right else "WRONG")
    return right


def bound_of(name: str) -> float:
    if name == vllm_layouts.W4A8_NAME:
        return vllm_layouts.SCALE_ERROR
    return OTHERS_MAX_ERROR if name in (COMPILING_BY_SHAPE, COMPILING_BY_M) else MAX_ERROR


def beside_others(row: dict[str, Any], ours: str) -> str:
    """How fast ours is as a multiple of the best of the others, with that one's name."""
    others = {name: us for name, us in row["microseconds"].items() if name != BASELINE and not is_ours(name)}
    if not others:
        return "-"
    best = min(others, key=lambda name: others[name])
    return f"{others[best] / row['microseconds'][ours]:.2f} {best[:5]}"


def record(arguments: argparse.Namespace, results: dict[str, list[dict]], patience: Patience) -> None:
    """Written after every shape: what a run cut short has measured is kept."""
    told = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "model": arguments.model,
        "weights": spec_of(arguments).label,
        "left_out": patience.left_out,
        "results": results,
    }
    write_json(arguments.out, told)


def jobs_for(
    names: list[str],
    ms: list[int],
    shapes: dict[str, tuple[int, int]],
    spec: WeightFormat,
    device: torch.device,
) -> list[Job]:
    """What is worth a process: each shape of one package, each M of the other."""
    jobs = [Job(COMPILING_BY_SHAPE, n, k, max(ms), spec) for n, k in shapes.values()]
    jobs += [Job(COMPILING_BY_M, *next(iter(shapes.values())), m, spec) for m in ms]
    return [
        job
        for job in jobs
        if job.layout in names
        if LAYOUTS[job.layout].refuses(problem_of(spec, job.n, job.k, device)) is None
    ]


def spec_of(arguments: argparse.Namespace) -> WeightFormat:
    if arguments.format == "int4":
        return int4(arguments.group_size, arguments.fractional)
    if arguments.format == "int4-fp8":
        return Int4(arguments.group_size, symmetric=True, activations="fp8")
    others = {"int8": Int8(arguments.group_size), "nvfp4": NVFP4(), "fp8": FP8(), "fp8-block": FP8(BLOCKS)}
    others["int8-w8a8"] = Int8(WHOLE_ROW, INT8_INPUTS)
    return others[arguments.format]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default="qwen3-8b")
    parser.add_argument("--m", default="1,8,16,32,64,128,256,512,2048,8192", help="comma-separated")
    parser.add_argument("--layouts", default="", help="comma-separated; all that serve the problem if empty")
    parser.add_argument("--format", choices=OURS, default="int4")
    parser.add_argument("--group-size", type=int, default=128, help="of INT4 and INT8")
    parser.add_argument("--fractional", action="store_true")
    parser.add_argument("--compile-seconds", type=float, default=600, help="for all that is compiled ahead")
    parser.add_argument("--first-call-seconds", type=float, default=600, help="for a layout's own tuning")
    parser.add_argument("--tuning-ms", type=float, default=100, help="for each kernel that a layout tunes")
    parser.add_argument("--vllm", type=Path, help="the folder of vLLM's packages (`vllm_layouts.py`)")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.vllm is not None:
        vllm_layouts.register(arguments.vllm)
    device = torch.device("cuda")
    ms = [int(m) for m in arguments.m.split(",")]
    names = [name for name in arguments.layouts.split(",") if name] or list(LAYOUTS)
    spec = spec_of(arguments)
    shapes = MODELS[arguments.model]
    patience = Patience(arguments.first_call_seconds)
    tune_for(arguments.tuning_ms)
    for job, why in compile_ahead(
        jobs_for(names, ms, shapes, spec, device), arguments.compile_seconds
    ).items():
        for n, k in [(job.n, job.k)] if job.layout == COMPILING_BY_SHAPE else shapes.values():
            for m in ms if job.layout == COMPILING_BY_SHAPE else [job.m]:
                patience.leave_out(job.layout, f"{n}x{k} M={m}", why)
    results = {}
    for shape, (n, k) in shapes.items():
        results[f"{shape} {n}x{k}"] = measure_shape(spec, n, k, ms, names, patience, device)
        if arguments.out:
            record(arguments, results, patience)
    served = [name for name in names if any(name in r["errors"] for rows in results.values() for r in rows)]
    right = print_tables(results, ms, served, OURS[arguments.format])
    sys.exit(0 if right else 1)


if __name__ == "__main__":
    main()
