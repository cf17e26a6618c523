"""Times tiles of the portable packed product on the shapes of Qwen3-8B, as code for an older GPU.

    python -P tests/bench/kernels/portable_tiles.py --m 8,64,512 --out OUT/portable_tiles.json
    python -P tests/bench/kernels/portable_tiles.py --as 8.9 --m 16 --format iq2-xxs
    python -P tests/bench/kernels/portable_tiles.py --m 16,32 --shapes gate_up --splits 1,2,3

Prints the five fastest of each shape and M with their speed over bf16: rows of x, rows of the weight, stages,
warps, parts, and splits of K where these are given. All are compiled beforehand, in as
many processes as there are cores; weights are rotated past the L2 cache, and calls run in CUDA graphs. The
table in `kernels/portable/tiles.py` was made so; whether answers are right is `portable.py`'s to say.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)}
ROTATED_BYTES = 300e6
CALLS, SAMPLES = 40, 4
SHARED_KB = 160
MAX_SUMS = 128
"""Of a thread."""


def chosen(m: int, given: str) -> list["Tile"]:
    """The given tiles, if there are any, that have m rows or, for more rows of x, at least 64. A weight must
    have semaphores enough.
    """
    if not given:
        return list(tiles(m))
    asked = [Tile(*map(int, words.split("/"))) for words in given.split(",")]
    n, most = 4096, semaphores_of(4096)
    return [
        tile
        for tile in asked
        if (tile.bm == m or min(m, tile.bm) >= 64) and -(-m // tile.bm) * -(-n // tile.bn) <= most
    ]


def tiles(m: int) -> Iterator["Tile"]:
    rows = [bm for bm in (8, 16, 32, 64, 128) if bm <= max(8, 2 * m)]
    for bm, bn, warps, stages, parts in itertools.product(
        rows[-2:], (64, 128, 256), (2, 4, 8), (3, 4, 6), (1, 2, 4)
    ):
        in_flight = (stages - 1) * (64 * bn + 256 * bm)
        if bn >= 16 * warps and in_flight <= SHARED_KB * 1024 and bm * bn <= MAX_SUMS * 32 * warps:
            yield Tile(bm, bn, stages, warps, parts)


def setup(capability: str, name: str) -> None:
    """In each process: the older GPU, before anything compiles, and the format."""
    sys.path.insert(0, str(Path(__file__).parent))
    if capability != "9.0":
        from older_gpu import pretend

        pretend(*map(int, capability.split(".")))
    global LAYOUT, SPEC, Tile, packed_matmul, semaphores_of, torch
    import torch
    from scalegate.kernels.portable import packed_matmul
    from scalegate.kernels.portable.tiles import Tile, semaphores_of
    from scalegate.layouts.formats.int4 import Int4
    from scalegate.layouts.formats.iq2_xxs import IQ2XXS
    from scalegate.layouts.packing.portable import INT4_PORTABLE, IQ2_XXS_PORTABLE

    LAYOUT, SPEC = (INT4_PORTABLE, Int4(128)) if name == "int4" else (IQ2_XXS_PORTABLE, IQ2XXS())


def operands(n: int, k: int, most: int) -> list:
    packed = LAYOUT.pack(SPEC.random(n, k, torch.device("cuda")), torch.bfloat16)
    copies = max(2, min(most, int(ROTATED_BYTES // packed.nbytes)))
    tensors = [{name: tensor.clone() for name, tensor in packed.tensors.items()} for _ in range(copies)]
    return [LAYOUT.operand(replace(packed, tensors=of_copy)) for of_copy in tensors]


def multiply(x: "torch.Tensor", operand: Any, n: int, tile: "Tile", splits: int) -> "torch.Tensor":
    """With so many splits of K, or as many as the table has if that is 0."""
    own = packed_matmul.splits_of
    if splits:
        packed_matmul.splits_of = lambda n, steps: splits
    try:
        return packed_matmul.matmul(x, operand, n, tile)
    finally:
        packed_matmul.splits_of = own


def compile_one(job: tuple[int, tuple[int, ...], int, tuple[str, ...]]) -> None:
    m, tile, splits, shapes = job
    sizes = [SHAPES[name] for name in shapes]
    forms = {packed_matmul.splits_of(n, k // 128) > 1: (n, k) for n, k in sizes}
    for n, k in forms.values():  # with splits of K and without
        x = torch.zeros(m, k, device="cuda", dtype=torch.bfloat16)
        multiply(x, operands(n, k, 1)[0], n, Tile(*tile), splits)
    torch.cuda.synchronize()


def microseconds(call: Callable[[int], "torch.Tensor"]) -> float:
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        call(0)
        with torch.cuda.graph(graph, stream=stream):
            for turn in range(CALLS):
                call(turn)
        best = float("inf")
        for _ in range(SAMPLES):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            best = min(best, begin.elapsed_time(end) * 1e3 / CALLS)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--m", default="8,16,32,64,128,512")
    parser.add_argument("--as", dest="capability", default="8.0", choices=["8.0", "8.6", "8.9", "9.0"])
    parser.add_argument("--format", default="int4", choices=["int4", "iq2-xxs"])
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--tiles", default="", help="comma-separated, as printed; else a grid of them")
    parser.add_argument("--splits", default="0", help="comma-separated; 0 is as many as the table has")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = [int(m) for m in options.m.split(",")]
    shapes, splits = tuple(options.shapes.split(",")), [int(count) for count in options.splits.split(",")]
    setup(options.capability, options.format)
    fields = ("bm", "bn", "stages", "warps", "parts")
    jobs = [
        (m, tuple(getattr(tile, name) for name in fields), count, shapes)
        for m in rows
        for tile in chosen(m, options.tiles)
        for count in {min(count, 2) for count in splits}  # more splits are the same code
    ]
    spawn = multiprocessing.get_context("spawn")
    with spawn.Pool(len(os.sched_getaffinity(0)), setup, [options.capability, options.format]) as pool:
        pool.map(compile_one, jobs, chunksize=1)
    results = {}
    for name in shapes:
        n, k = SHAPES[name]
        packed = operands(n, k, CALLS)
        count = max(2, int(ROTATED_BYTES // (2 * n * k)))
        dense = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
        for m in rows:
            x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)

            def unquantized(i: int, x=x, dense=dense):
                return torch.nn.functional.linear(x, dense[i % len(dense)])

            def ours(i: int, tile, count, x=x, packed=packed, n=n):
                return multiply(x, packed[i % len(packed)], n, tile, count)

            timed = [
                (microseconds(partial(ours, tile=tile, count=count)), tile, count)
                for tile in chosen(m, options.tiles)
                for count in splits
            ]
            timed.sort(key=lambda entry: entry[0])
            bf16 = microseconds(unquantized)
            told = [(us, *(getattr(tile, field) for field in fields), count) for us, tile, count in timed]
            results[f"{name} {m}"] = {"bf16": bf16, "tiles": told}
            best = "  ".join(f"{us:.1f} ({bf16 / us:.2f}) {'/'.join(map(str, of))}" for us, *of in told[:5])
            print(f"{name:8} M={m:<5} bf16 {bf16:.1f}  {best}", flush=True)
        if options.out:
            options.out.write_text(json.dumps({"as": options.capability, "microseconds": results}, indent=1))


if __name__ == "__main__":
    main()
