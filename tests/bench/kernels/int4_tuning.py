"""Times every tile and split that `kernels/hopper/stream_k_config.py` could choose beside the one it chooses.

    python -P tests/bench/kernels/int4_tuning.py --model qwen3-8b --m 16,64,512 --out tuning.json

For whoever changes its heuristics: all tiles of a bucket of M, each with one CTA a tile, one an SM, as many
as fit, as many as split every tile into equal parts, and as many as share x in L2; of 256x64 tiles also
with prefetched tails and heads an iteration longer or shorter.
Every answer is compared with fp32 before it is timed and again afterwards. Not for comparing layouts: that is
`linear.py`.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from scalegate.base.atomic_files import write_json
from scalegate.kernels.hopper import stream_k, stream_k_config
from scalegate.kernels.hopper.stream_k import Config
from scalegate.kernels.hopper.tile import NUM_SMS
from scalegate.layouts.choosing.timing import TimingBudget, interleaved_microseconds
from scalegate.layouts.packing.layout import PackedWeight
from scalegate.layouts.packing.swap_ab import PACKING, SWAP_AB
from scalegate.tests.bench.kernels.linear import (
    MODELS,
    ROTATED_BYTES,
    copies_of,
    exact_weight,
    multiply_dense,
    random_int4,
)
from torch import Tensor

BASELINE, CHOSEN = "unquantized", "chosen"
MAX_ERROR = 4e-3
GROUP_SIZE = 128


def tiles_for(m: int) -> list[stream_k.Tile]:
    """The tiles that the kernel is compiled for, as far as so many rows can use them."""
    rows = next((tile.m for tile in stream_k_config.TILES if m <= tile.m), 128)
    return [tile for tile in stream_k_config.TILES if tile.m == rows or m > 128 <= tile.m]


def counts_for(tile: stream_k.Tile, m: int, n: int, k: int) -> list[int]:
    """Numbers of CTAs that keep most of the chip busy."""
    tiles = triton.cdiv(m, tile.m) * triton.cdiv(n, tile.n)
    iters_per_tile = triton.cdiv(k, tile.iter_columns)
    slots = NUM_SMS * tile.ctas_per_sm
    parts = {tiles * p for p in range(2, iters_per_tile + 1) if 0.6 * slots <= tiles * p <= slots}
    each = triton.cdiv(tiles, slots)
    whole = {tiles // each} if tiles % each == 0 else set()
    alike = stream_k_config.l2_aligned_ctas(tiles, slots, 4 * tile.ctas_per_sm)
    counts = {tiles, NUM_SMS, slots, alike, *parts, *whole}
    return sorted(count for count in counts if 80 <= count <= tiles * iters_per_tile)


def heads_for(m: int, n: int, k: int) -> list[tuple[int, int]]:
    """Numbers of CTAs and iterations of a head, of 256x64 tiles with prefetched tails."""
    tile = stream_k_config.TILE_256X64
    chosen = stream_k_config.head_tail_config(tile.num_tiles(m, n), triton.cdiv(k, tile.iter_columns))
    if m <= 128 or chosen is None:
        return []
    return [(chosen.num_ctas, chosen.head_iters + longer) for longer in (-1, 0, 1)]


def product(packed: PackedWeight, x: Tensor, config: Config) -> Tensor:
    y = torch.empty(len(x), packed.shape[0], dtype=x.dtype, device=x.device)
    stream_k.launch(x, PACKING.operand(packed), y, config)
    return y


def contestants(
    m: int, n: int, k: int, copies: list[PackedWeight], x: Tensor
) -> Iterator[tuple[str, Callable[[int], Tensor]]]:
    yield CHOSEN, lambda i: SWAP_AB.matmul(x, copies[i % len(copies)])
    for tile in tiles_for(m):
        for count in counts_for(tile, m, n, k):
            name = f"{tile.m}x{tile.n}, {tile.k_tiles * 64} columns x {tile.stages}, {count} CTAs"
            config = Config(tile, count)
            yield name, lambda i, config=config: product(copies[i % len(copies)], x, config)
    for count, head in heads_for(m, n, k):
        config = Config(stream_k_config.TILE_256X64, count, head_iters=head)
        name = f"256x64, {count} CTAs, heads of {head}"
        yield name, lambda i, config=config: product(copies[i % len(copies)], x, config)


def wrong(call: Callable[[int], Tensor], expected: Tensor) -> bool:
    """Whether the answer is off, or another the second time."""
    first, again = call(0).float(), call(0).float()
    error = float((first - expected).norm() / expected.norm())
    return not error <= MAX_ERROR or not torch.equal(first, again)


def measure_shape(n: int, k: int, ms: list[int], device: torch.device) -> list[dict[str, Any]]:
    weight = random_int4(n, k, GROUP_SIZE, False, device)
    exact = exact_weight(weight).float()
    packed = SWAP_AB.pack(weight, torch.bfloat16)
    copies = copies_of(packed, max(2, int(ROTATED_BYTES // packed.nbytes)))
    dense = [exact.to(torch.bfloat16) for _ in range(max(2, int(ROTATED_BYTES // (2 * n * k))))]
    rows = []
    for m in ms:
        x = torch.randn(m, k, device=device, dtype=torch.bfloat16)
        expected = x.float() @ exact.T
        calls = dict(contestants(m, n, k, copies, x))
        failed = [name for name, call in calls.items() if wrong(call, expected)]
        timed = {BASELINE: multiply_dense(dense, x), **calls}
        times = interleaved_microseconds(timed, len(copies), device, TimingBudget(samples=8))
        failed += [name for name, call in calls.items() if name not in failed and wrong(call, expected)]
        rows.append({"m": m, "microseconds": times, "failed": failed})
        best = sorted((us, name) for name, us in times.items() if name not in (BASELINE, *failed))[:4]
        told = " | ".join(f"{us:.1f} {name}" for us, name in best)
        print(f"{n}x{k} M={m}: bf16 {times[BASELINE]:.1f}, chosen {times[CHOSEN]:.1f} | {told}", flush=True)
        for name in failed:
            print(f"{n}x{k} M={m}: WRONG: {name}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default="qwen3-8b")
    parser.add_argument("--m", default="1,8,16,32,64,128,256,512", help="comma-separated")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device = torch.device("cuda")
    torch.backends.cuda.matmul.allow_tf32 = False
    ms = [int(m) for m in arguments.m.split(",")]
    told: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "model": arguments.model,
        "results": {},
    }
    for shape, (n, k) in MODELS[arguments.model].items():
        told["results"][f"{shape} {n}x{k}"] = measure_shape(n, k, ms, device)
        if arguments.out:
            write_json(arguments.out, told)
    failed = [row for rows in told["results"].values() for row in rows if row["failed"]]
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
