"""Times the grouped products of a mixture-of-experts layer, unquantized, INT4 and FP8, beside torch's.

    python -P tests/bench/kernels/experts.py --out OUT/experts.json
    python -P tests/bench/kernels/experts.py --tune --out tuned.json

Qwen3-30B-A3B's shape, INT4 in groups of 128, FP8 with a scale a row and the rounding of its inputs. Calls run
in CUDA graphs over several layers' weights and as many random routings, each token's experts distinct;
figures are medians of interleaved samples. A layer is routing and both products, without the activation
between them; `grouped_mm` is what transformers does under `experts_implementation="grouped_mm"`: sort,
gather, count, the two products, back into order. GB/s are the bytes of the experts taken, each once, over the
time of a product. Answers are compared with fp32 first.

`--tune` tries tiles and rows of a block for one number of tokens of each bucket of `kernels/experts/tile.py`,
for each product alone, and prints the quickest beside what the tables say.
"""

import argparse
import itertools
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import triton
from scalegate.base.atomic_files import write_json
from scalegate.kernels.experts import fp8, int4, packed, unquantized
from scalegate.kernels.experts.routing import ExpertRouting, route
from scalegate.kernels.experts.tile import BLOCK_ROWS, Tile, bucket_of
from scalegate.kernels.fp8.round_rows import round_rows
from scalegate.layouts.choosing.timing import TimingBudget, interleaved_microseconds
from scalegate.layouts.formats.e4m3 import PER_TOKEN
from torch import Tensor

EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 128, 8, 2048, 768
SHAPES = {"gate_up": (2 * INTERMEDIATE, HIDDEN), "down": (HIDDEN, INTERMEDIATE)}
GROUP_SIZE = 128
LAYERS, ROUTINGS = 3, 12
"""Weights and routings that calls go through in turn: 4 GB, and no expert's weight still in the cache."""
TOKENS = (1, 8, 32, 64, 128, 512, 4096)
TUNED_TOKENS = (1, 2, 16, 32, 64, 128, 256, 512, 1024, 4096)
MAX_ERROR = 4e-3
DEVICE = torch.device("cuda")

Weights = dict[str, list[Tensor]]
Int4Weights = dict[str, list[tuple[Tensor, Tensor]]]


def dense_weights() -> Weights:
    shape_of = {name: (EXPERTS, n, k) for name, (n, k) in SHAPES.items()}
    return {
        name: [torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for _ in range(LAYERS)]
        for name, shape in shape_of.items()
    }


def random_codes(n: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes of two in a byte, bf16 scales, integer zeros."""
    groups = (EXPERTS, n, k // GROUP_SIZE)
    return (
        torch.randint(0, 256, (EXPERTS, n, k // 2), dtype=torch.uint8, device=DEVICE),
        (torch.rand(groups, device=DEVICE) * 0.02 + 0.001).to(torch.bfloat16),
        torch.randint(0, 16, groups, dtype=torch.uint8, device=DEVICE),
    )


def int4_weights() -> Int4Weights:
    return {
        name: [int4.pack(*random_codes(n, k), GROUP_SIZE, torch.bfloat16) for _ in range(LAYERS)]
        for name, (n, k) in SHAPES.items()
    }


def fp8_weights() -> Int4Weights:
    """Codes [E, N, K] and scales [E, 1, N]."""
    made: Int4Weights = {name: [] for name in SHAPES}
    for name, (n, k) in SHAPES.items():
        for _ in range(LAYERS):
            codes = torch.randn(EXPERTS, n, k, device=DEVICE).mul(100).clamp(-448, 448)
            scale = torch.rand(EXPERTS, 1, n, device=DEVICE).add(0.5).mul(0.0002)
            made[name].append((codes.to(torch.float8_e4m3fn), scale))
    return made


def random_routings(tokens: int) -> list[Tensor]:
    return [torch.rand(tokens, EXPERTS, device=DEVICE).topk(TOP_K).indices for _ in range(ROUTINGS)]


def inputs(tokens: int) -> dict[str, Tensor]:
    """x of each product: by token, and by assignment."""
    rows = {"gate_up": tokens, "down": tokens * TOP_K}
    return {
        name: torch.randn(rows[name], SHAPES[name][1], device=DEVICE, dtype=torch.bfloat16) for name in SHAPES
    }


def multiply_dense(
    name: str, x: Tensor, weights: Weights, i: int, routing: ExpertRouting, tile=None
) -> Tensor:
    return unquantized.grouped_matmul(x, weights[name][i % LAYERS], routing, tile=tile)


def multiply_int4(
    name: str, x: Tensor, weights: Int4Weights, i: int, routing: ExpertRouting, tile=None
) -> Tensor:
    words, scale_words = weights[name][i % LAYERS]
    return int4.grouped_matmul(x, words, scale_words, routing, SHAPES[name][0], GROUP_SIZE, False, tile=tile)


def multiply_fp8(
    name: str, x: Tensor, weights: Int4Weights, i: int, routing: ExpertRouting, tile=None
) -> Tensor:
    inputs, scale = round_rows(x)
    return fp8.grouped_matmul(inputs, scale, *weights[name][i % LAYERS], routing, x.dtype, tile=tile)


MULTIPLY: dict[str, Callable[..., Tensor]] = {
    "bf16": multiply_dense,
    "int4": multiply_int4,
    "fp8": multiply_fp8,
}


def grouped_mm_layer(x: dict[str, Tensor], weights: Weights, expert: Tensor, i: int) -> Tensor:
    """transformers.integrations.moe.grouped_mm_experts_forward without activation and weights of experts."""
    sorted_experts, order = torch.sort(expert.flatten())
    rows = x["gate_up"][order // TOP_K]
    counts = torch.histc(sorted_experts.int(), bins=EXPERTS, min=0, max=EXPERTS - 1)
    offsets = torch.cumsum(counts, dim=0, dtype=torch.int32)
    grouped_mm = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm
    grouped_mm(rows, weights["gate_up"][i % LAYERS].transpose(1, 2), offs=offsets)
    y = grouped_mm(x["down"], weights["down"][i % LAYERS].transpose(1, 2), offs=offsets)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=DEVICE)
    return y[back]


def our_layer(kind: str, x: dict[str, Tensor], weights, experts: list[Tensor], i: int) -> None:
    routing = route(experts[i], EXPERTS)
    for name in SHAPES:
        MULTIPLY[kind](name, x[name], weights, i, routing)


def relative_error(kind: str, name: str, x: Tensor, weights, expert: Tensor, routing: ExpertRouting) -> float:
    """Of a product on the first layer's weights, into poisoned memory; some of the experts taken."""
    torch.full((routing.count, SHAPES[name][0]), float("nan"), device=DEVICE, dtype=x.dtype)
    answer = MULTIPLY[kind](name, x, weights, 0, routing).float()
    flat = expert.flatten()
    rows = x.repeat_interleave(routing.count // len(x), 0).float()
    if kind == "int4":
        dense = int4.reference_weight(*weights[name][0], SHAPES[name][0], GROUP_SIZE, False, torch.bfloat16)
    elif kind == "fp8":
        codes, scale = weights[name][0]
        dense, rows = codes.float() * scale.transpose(1, 2), PER_TOKEN.round(rows)
    else:
        dense = weights[name][0]
    wrong = whole = 0.0
    for index in flat.unique()[:16].tolist():
        expected = rows[flat == index] @ dense[index].float().t()
        wrong += float((answer[flat == index] - expected).square().sum())
        whole += float(expected.square().sum())
    return (wrong / whole) ** 0.5


def bytes_taken(kind: str, name: str, experts: list[Tensor]) -> float:
    """Of the weights of the experts that a routing takes, on average."""
    n, k = SHAPES[name]
    bits = {"bf16": 16.0, "int4": 4.0 + 32.0 / GROUP_SIZE, "fp8": 8.0 + 32.0 / k}[kind]
    taken = sum(len(expert.unique()) for expert in experts) / len(experts)
    return taken * n * k * bits / 8


def measure(tokens: int, weights: dict[str, dict], budget: TimingBudget) -> dict[str, float]:
    experts, x = random_routings(tokens), inputs(tokens)
    routings = [route(expert, EXPERTS) for expert in experts]
    figures: dict[str, float] = {"tokens": tokens}
    calls: dict[str, Callable[[int], object]] = {
        "layer_bf16": partial(our_layer, "bf16", x, weights["bf16"], experts),
        "layer_int4": partial(our_layer, "int4", x, weights["int4"], experts),
        "layer_fp8": partial(our_layer, "fp8", x, weights["fp8"], experts),
        "routing": lambda i: route(experts[i], EXPERTS),
        "layer_grouped_mm": lambda i: grouped_mm_layer(x, weights["bf16"], experts[i], i),
    }
    for kind, name in itertools.product(MULTIPLY, SHAPES):
        error = relative_error(kind, name, x[name], weights[kind], experts[0], routings[0])
        figures[f"{name}_{kind}_error"] = error
        if not error <= MAX_ERROR:
            raise SystemExit(f"{name} {kind}, T={tokens}: relative error {error:.2e}")

        def product(i: int, kind: str = kind, name: str = name) -> Tensor:
            return MULTIPLY[kind](name, x[name], weights[kind], i, routings[i])

        calls[f"{name}_{kind}"] = product

    def report(name: str, error: Exception) -> None:
        print(f"T={tokens}: {name} failed: {str(error)[:200]}", flush=True)

    times = interleaved_microseconds(calls, ROUTINGS, DEVICE, budget, report)
    figures |= {f"{call}_us": microseconds for call, microseconds in times.items()}
    for kind, name in itertools.product(MULTIPLY, SHAPES):
        figures[f"{name}_{kind}_gb_s"] = bytes_taken(kind, name, experts) / times[f"{name}_{kind}"] / 1e3
    for kind in ("int4", "fp8"):
        figures[f"{kind}_over_bf16"] = times["layer_bf16"] / times[f"layer_{kind}"]
    return figures


HEADINGS = (
    "     T  routing | gate_up bf16 (GB/s)    int4 (GB/s)     fp8 (GB/s) | down bf16 (GB/s)    int4 (GB/s)"
    "     fp8 (GB/s) | layer bf16   int4    fp8  grouped_mm  int4/bf16  fp8/bf16"
)


def line_of(figures: dict[str, float]) -> str:
    parts = [f"{figures['tokens']:6.0f} {figures['routing_us']:8.1f} |"]
    for name in SHAPES:
        for kind in MULTIPLY:
            rate = figures[f"{name}_{kind}_gb_s"]
            parts.append(f"{figures[f'{name}_{kind}_us']:10.1f} ({rate:5.0f})")
        parts.append("|")
    torchs = figures.get("layer_grouped_mm_us", float("nan"))
    ours = " ".join(f"{figures[f'layer_{kind}_us']:8.1f}" for kind in MULTIPLY)
    parts.append(f"{ours} {torchs:9.1f} {figures['int4_over_bf16']:9.2f}x {figures['fp8_over_bf16']:9.2f}x")
    return " ".join(parts)


def candidates(kind: str, bucket: int) -> Iterator[tuple[int, Tile]]:
    """Rows of a block, and tiles that may be good for a bucket: its own rows, and those of its neighbours."""
    own = BLOCK_ROWS[bucket]
    for rows in sorted({max(8, own // 2), own, min(128, own * 2)}):
        if kind == "fp8":
            shapes = [(64, 128, 4), (128, 128, 4), (128, 128, 8)]
            stages = (3, 4, 6) if rows < 64 else (3, 4)
        elif kind == "int4":
            shapes = [(32, 128, 2), (64, 128, 2), (128, 128, 2), (64, 128, 4), (128, 128, 4)]
            if rows >= 64:
                shapes = [(64, 128, 4), (128, 128, 4), (128, 128, 8)]
            stages = (3, 5) if rows > 16 else (3, 5, 8)
        else:
            shapes = [(64, 64, 4), (64, 128, 4), (128, 64, 4), (128, 128, 4)]
            if rows >= 64:
                shapes = [(128, 64, 4), (128, 64, 8), (256, 64, 8)]
            stages = (3, 5)
        for (n, k, warps), depth in itertools.product(shapes, stages):
            yield rows, Tile(n, k, depth, warps)


def shared_bytes(kind: str, rows: int, tile: Tile) -> int:
    of_weight, of_x = {"bf16": (2, 2), "int4": (0.53, 2), "fp8": (1, 1)}[kind]
    return int(tile.stages * tile.k * (tile.n * of_weight + rows * of_x))


@dataclass(frozen=True)
class Form:
    """A product as it is compiled."""

    kind: str
    name: str
    rows: int
    tile: Tile

    def __str__(self) -> str:
        return f"{self.rows}x{self.tile.n}x{self.tile.k} s{self.tile.stages} w{self.tile.warps}"


def forms_of(kind: str, name: str, bucket: int) -> list[Form]:
    """What the table says comes first."""
    table = {"bf16": unquantized.TILES, "int4": packed.TILES, "fp8": fp8.TILES}[kind]
    tried = dict.fromkeys([(BLOCK_ROWS[bucket], table[bucket]), *candidates(kind, bucket)])
    return [Form(kind, name, *sizes) for sizes in tried if shared_bytes(kind, *sizes) <= 220 * 1024]


def compile_form(form: Form) -> None:
    """Leaves the machine code in Triton's cache on disk; one expert stands for all of them."""
    n, k = SHAPES[form.name]
    routing = route(torch.zeros(1, TOP_K, dtype=torch.int64, device=DEVICE), 1, form.rows)
    x = torch.zeros(1 if form.name == "gate_up" else TOP_K, k, device=DEVICE, dtype=torch.bfloat16)
    if form.kind == "bf16":
        weight = torch.zeros(1, n, k, device=DEVICE, dtype=torch.bfloat16)
        unquantized.grouped_matmul(x, weight, routing, tile=form.tile)
    elif form.kind == "fp8":
        codes = torch.zeros(1, n, k, device=DEVICE).to(torch.float8_e4m3fn)
        fp8.grouped_matmul(
            *round_rows(x), codes, torch.ones(1, 1, n, device=DEVICE), routing, x.dtype, form.tile
        )
    else:
        words = torch.zeros(1, n // 64, k // 128, 64, 16, device=DEVICE, dtype=torch.int32)
        scale_words = torch.zeros(1, k // GROUP_SIZE, n, device=DEVICE, dtype=torch.int32)
        int4.grouped_matmul(x, words, scale_words, routing, n, GROUP_SIZE, False, tile=form.tile)
    torch.cuda.synchronize()


def compile_all(forms: set[Form]) -> None:
    """In many processes at once; a form that fails does so again, by name, where it is timed."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(16, os.cpu_count() or 1), mp_context=context) as pool:
        outcomes = [pool.submit(compile_form, form) for form in forms]
    failed = sum(outcome.exception() is not None for outcome in outcomes)
    print(f"compiled {len(forms)} forms, of which {failed} failed", flush=True)


def tune(
    weights: dict[str, dict], kinds: Sequence[str], budget: TimingBudget, tokens: Sequence[int]
) -> list[dict]:
    kinds_and_names = list(itertools.product(kinds, SHAPES))
    compile_all(
        {
            form
            for bucket in {bucket_of(count * TOP_K, EXPERTS) for count in tokens}
            for pair in kinds_and_names
            for form in forms_of(*pair, bucket)
        }
    )
    return [
        tune_product(kind, name, count, weights[kind], budget)
        for count in tokens
        for kind, name in kinds_and_names
    ]


def tune_product(kind: str, name: str, tokens: int, weights: dict, budget: TimingBudget) -> dict:
    experts, x = random_routings(tokens), inputs(tokens)[name]
    bucket = bucket_of(tokens * TOP_K, EXPERTS)
    forms = forms_of(kind, name, bucket)
    routings = {
        rows: [route(expert, EXPERTS, rows) for expert in experts] for rows in {form.rows for form in forms}
    }

    def multiply(form: Form, i: int) -> Tensor:
        return MULTIPLY[kind](name, x, weights, i, routings[form.rows][i], form.tile)

    def report(form: str, error: Exception) -> None:
        print(f"  {form} failed: {str(error)[:80]}", flush=True)

    calls = {str(form): partial(multiply, form) for form in forms}
    times = interleaved_microseconds(calls, ROUTINGS, DEVICE, budget, report)
    best = ", ".join(f"{form} {times[form]:.1f}" for form in sorted(times, key=times.__getitem__)[:4])
    table = f"{forms[0]} {times[str(forms[0])]:.1f}"
    print(f"bucket {bucket} T={tokens:<5}{name:>8} {kind}, us: table {table}; best {best}", flush=True)
    return {"bucket": bucket, "tokens": tokens, "product": name, "kind": kind, "us": times}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tokens", type=lambda text: [int(part) for part in text.split(",")])
    parser.add_argument("--tune", action="store_true", help="try other tiles instead")
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=list(MULTIPLY), help="to tune")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    weights = {"bf16": dense_weights(), "int4": int4_weights(), "fp8": fp8_weights()}
    results: list[dict] = []
    if arguments.tune:
        budget = TimingBudget(samples=8, seconds=0.4)
        results = tune(weights, arguments.kinds, budget, arguments.tokens or TUNED_TOKENS)
    else:
        print(HEADINGS, flush=True)
        for tokens in arguments.tokens or TOKENS:
            results.append(measure(tokens, weights, TimingBudget()))
            print(line_of(results[-1]), flush=True)
    if arguments.out is not None:
        device = torch.cuda.get_device_name()
        told = {
            "device": device,
            "torch": torch.__version__,
            "triton": triton.__version__,
            "results": results,
        }
        write_json(arguments.out, told)


if __name__ == "__main__":
    main()
