"""The IQ2_XXS product beside the INT4, NVFP4 and unquantized ones on a model's shapes, and its own ceilings.

    python -P tests/bench/kernels/iq2_xxs.py --out OUT/iq2_xxs_qwen3_8b.json
    python -P tests/bench/kernels/iq2_xxs.py --tiles 1,1,8,2 2,1,4,4 --m 1     tiles of the one-row kernel
    python -P tests/bench/kernels/iq2_xxs.py --as 8.0       code for an older GPU, which the driver translates
    python -P tests/bench/kernels/iq2_xxs.py --layouts nvfp4_swap_ab iq2_xxs --m 1,4,8,16,32,64,128

Weights are rotated past the L2 cache, calls run in CUDA graphs, figures are medians of interleaved samples;
every answer is compared with float64. The ceilings: the weight's bytes, of the format and as packed, over the
bandwidth of a large copy; its instructions, as counted in the compiled loops, over the issue slots. A table
of all layers together comes last: each layout's time, its share of the rate at which this GPU copies, and
how many times as fast as IQ2_XXS it is: Hopper's, or the portable one on another GPU.
"""

import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from scalegate.base.atomic_files import write_json
from scalegate.kernels.iq2_xxs import one_row
from scalegate.layouts.choosing.timing import TimingBudget, interleaved_microseconds
from scalegate.layouts.formats.int4 import Int4
from scalegate.layouts.formats.iq2_xxs import IQ2XXS
from scalegate.layouts.formats.nvfp4 import NVFP4
from scalegate.layouts.formats.unquantized import Unquantized
from scalegate.layouts.formats.weight_format import Weight, WeightFormat
from scalegate.layouts.packing.all_layouts import LAYOUTS
from scalegate.layouts.packing.iq2_xxs import IQ2_XXS
from scalegate.layouts.packing.layout import PackedWeight, Problem
from scalegate.layouts.packing.portable import IQ2_XXS_PORTABLE
from scalegate.tests.bench.kernels.linear import MODELS
from scalegate.tests.bench.kernels.older_gpu import pretend
from torch import Tensor

MAX_ERROR = 4e-3
ROTATED_BYTES = 300e6
SMS, ISSUE_SLOTS = 132, 128
CLOCK = 1.98e9
BANDWIDTH = 4.3e12
"""Bytes a second that a large copy reads and writes on an H200."""
PACKED_BITS = 2.5
ONE_ROW_INSTRUCTIONS, INSTRUCTIONS = 2.8, 2.6
"""A weight, with one row of x and with more (`tests/kernels/products/test_iq2_xxs_compiles.py` counts)."""
BY_MEMORY_ONLY = ("dequantize", "gemlite", "humming", "tinygemm", "swap_ab_invariant")
"""Layouts that are left out: they are measured by `linear.py`."""
OWN = f"{IQ2XXS.name} iq2_xxs"
PEERS: list[WeightFormat] = [Unquantized(), Int4(128), NVFP4()]


def copies_of(packed: PackedWeight) -> list[PackedWeight]:
    count = max(2, int(ROTATED_BYTES // packed.nbytes))
    return [packed] + [
        replace(packed, tensors={name: tensor.clone() for name, tensor in packed.tensors.items()})
        for _ in range(count - 1)
    ]


def tile_call(tile: one_row.Tile, copies: list[PackedWeight], x: Tensor, n: int) -> Callable[[int], Tensor]:
    operands = [IQ2_XXS.operand(packed) for packed in copies]

    def call(i: int) -> Tensor:
        y = torch.empty(1, n, dtype=x.dtype, device=x.device)
        one_row.launch(x, operands[i % len(operands)], y, tile)
        return y

    return call


def layout_call(copies: list[PackedWeight], x: Tensor) -> Callable[[int], Tensor]:
    layout = LAYOUTS[copies[0].layout]
    return lambda i: layout.matmul(x, copies[i % len(copies)])


def contestants(
    n: int, k: int, specs: list[WeightFormat], chosen: list[str]
) -> dict[str, tuple[Weight, list[PackedWeight]]]:
    """Every layout of ours that serves one of the formats, with its weight and copies of it.

    chosen: the names of layouts that are left; all if empty
    """
    device, found = torch.device("cuda"), {}
    for spec in specs:
        problem = Problem(spec, n, k, torch.bfloat16, device)
        for name, layout in LAYOUTS.items():
            if chosen and name not in chosen:
                continue
            if layout.refuses(problem) is None and name not in BY_MEMORY_ONLY:
                weight = spec.random(n, k, device)
                found[f"{spec.name} {name}"] = weight, copies_of(layout.pack(weight, torch.bfloat16))
    return found


def relative_error(answer: Tensor, x: Tensor, weight: Weight) -> float:
    expected = x.double() @ weight.dequantize(torch.float64).T
    return float((answer.double() - expected).norm() / expected.norm())


def measure(
    n: int, k: int, ms: list[int], tiles: list[one_row.Tile], chosen: list[str]
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """The times and errors at every M, and the bytes of each layout's weight."""
    found = contestants(n, k, [*(PEERS[:1] if tiles else PEERS), IQ2XXS()], chosen)
    own = OWN
    rows = []
    for m in ms:
        x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        calls = {name: layout_call(copies, x) for name, (_, copies) in found.items()}
        weights = {name: weight for name, (weight, _) in found.items()}
        for tile in tiles if m == 1 else []:
            name = str(tile)
            calls[name], weights[name] = tile_call(tile, found[own][1], x, n), found[own][0]
        errors = {name: relative_error(call(0), x, weights[name]) for name, call in calls.items()}
        most = max(len(copies) for _, copies in found.values())
        times = interleaved_microseconds(calls, most, x.device, TimingBudget(samples=16, seconds=0.6))
        rows.append({"m": m, "microseconds": times, "errors": errors})
        print(f"{n}x{k} M={m}: " + "  ".join(f"{name} {us:.1f}" for name, us in times.items()), flush=True)
        wrong = {name: error for name, error in errors.items() if not error <= MAX_ERROR}
        if wrong:
            print(f"{n}x{k} M={m}: WRONG: {wrong}", flush=True)
    return rows, {name: copies[0].nbytes for name, (_, copies) in found.items()}


def copied_bytes_a_second() -> float:
    """What a large copy reads and writes on this GPU."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    best = 0.0
    for _ in range(10):
        begin.record()
        target.copy_(source)
        end.record()
        torch.cuda.synchronize()
        best = max(best, 2 * source.numel() / (begin.elapsed_time(end) * 1e-3))
    return best


def table(results: dict[str, dict[str, Any]], bandwidth: float) -> list[str]:
    """All layers together by M: microseconds, the share of the bandwidth, and the speed over IQ2_XXS's."""
    shapes = list(results.values())
    reference = OWN if OWN in shapes[0]["bytes"] else f"{IQ2XXS.name} {IQ2_XXS_PORTABLE.name}"
    lines = [f"us (share of {bandwidth / 1e12:.2f} TB/s, speed over IQ2_XXS)"]
    lines[0] = f"{lines[0]:<56}" + "".join(f"{'M=' + str(row['m']):>20}" for row in shapes[0]["rows"])
    for name, total in shapes[0]["bytes"].items():
        total = sum(shape["bytes"][name] for shape in shapes)
        cells = []
        for at in range(len(shapes[0]["rows"])):
            times = [shape["rows"][at]["microseconds"] for shape in shapes]
            us, own = (sum(each.get(which, math.nan) for each in times) for which in (name, reference))
            cells.append(f"{us:.1f} ({total / bandwidth / us * 1e6:.0%}, {own / us:.2f})")
        lines.append(f"{name:<56}" + "".join(f"{cell:>20}" for cell in cells))
    return lines


def tile_of(text: str) -> one_row.Tile:
    return one_row.Tile(*map(int, text.split(",")))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default="qwen3-8b")
    parser.add_argument("--m", default="1,2,4,8,16,32,64,128,256,1024")
    parser.add_argument("--shapes", default="", help="comma-separated; all if empty")
    parser.add_argument("--tiles", nargs="*", type=tile_of, default=[])
    parser.add_argument("--as", dest="capability", help="compute capability of an older GPU: 8.0 or 8.9")
    parser.add_argument("--layouts", nargs="*", default=[], help="all of ours if empty")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.capability:
        pretend(*map(int, arguments.capability.split(".")))
    ms = [int(m) for m in arguments.m.split(",")]
    shapes = MODELS[arguments.model]
    wanted = arguments.shapes.split(",") if arguments.shapes else list(shapes)
    results = {}
    for name in wanted:
        n, k = shapes[name]
        floors = {
            "bytes": IQ2XXS().nbytes(n, k) / BANDWIDTH * 1e6,
            "packed_bytes": n * k * PACKED_BITS / 8 / BANDWIDTH * 1e6,
            "instructions_one_row": n * k * ONE_ROW_INSTRUCTIONS / (SMS * ISSUE_SLOTS * CLOCK) * 1e6,
            "instructions": n * k * INSTRUCTIONS / (SMS * ISSUE_SLOTS * CLOCK) * 1e6,
        }
        rows, sizes = measure(n, k, ms, arguments.tiles, arguments.layouts)
        results[name] = {"shape": [n, k], "floors_us": floors, "rows": rows, "bytes": sizes}
        print(f"{name}: floors " + ", ".join(f"{us:.1f} us by {by}" for by, us in floors.items()), flush=True)
        if arguments.out:
            told = {
                "device": torch.cuda.get_device_name(), "torch": torch.__version__, "model": arguments.model,
                "results": results,
            }  # fmt: skip
            write_json(arguments.out, told)
    right = all(
        error <= MAX_ERROR
        for result in results.values()
        for row in result["rows"]
        for error in row["errors"].values()
    )
    print("\n".join(["", *table(results, copied_bytes_a_second())]))
    print("right" if right else "WRONG")
    sys.exit(0 if right else 1)


if __name__ == "__main__":
    main()
