"""Prefill on a GPU: the attention kernels' speed by themselves, and the engine's prompts, Qwen3-4B's shape.

    python -P tests/bench/kernels/prefill.py --out OUT/prefill.json
    python -P tests/bench/kernels/prefill.py --formats unquantized fp8 --prompts 1x4096 8x4096 1x16384 8x16384
    python -P tests/bench/kernels/prefill.py --pages float8_e4m3fn --formats

A kernel's cell is requests x tokens x history: chunks of so many tokens behind a history in pages, checked
against torch on the same data. Operations are those that causality leaves. Of stored e4m3 the time includes
widening: of keys and values ("widened"), or of values alone, where queries are rounded to e4m3 and multiplied
by keys as they lie ("e4m3 keys"). Each KV format has an engine, with random weights, in a process of its own;
a prompt cell is requests x tokens, one token answered.
"""

import argparse
import functools
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

# Sets OpenMP's threads as it does for the commands, which has to come before torch.
import scalegate.pipeline  # noqa: F401
import torch
from scalegate.base.atomic_files import write_json
from scalegate.kernels.attention import hopper_prefill as prefill
from scalegate.kernels.attention.hopper_prefill import hopper_prefill
from scalegate.kernels.attention.options import AttentionOptions
from scalegate.kernels.attention.prefill import prefill_attention, prefill_attention_reference, tiles_of
from scalegate.kernels.attention.widen_pages import widen_pages
from scalegate.tests.bench.engine.kv_profile import milliseconds
from scalegate.tests.bench.kernels.attention import graph_microseconds
from scalegate.tests.bench.layouts.kv_decode import engine_of
from scalegate.tests.kernels.attention.rounded_queries import rounded_queries

HEADS, KV_HEADS, HEAD_DIM, PAGE = 32, 8, 128, 64
MODEL = "qwen3-4b"
CELLS = ["16x512x0", "1x4096x0", "1x4096x12288", "1x16384x0"]
FORMATS = ["unquantized", "fp8"]
PROMPTS = ["1x4096", "8x4096", "1x16384", "8x16384"]
CHECKED = 3
"""Tokens, each a tile by itself."""


def over_widened(q, keys, values, table, tiles, options, out) -> None:
    pages, table = step_pages(table)
    hopper_prefill(q, widen_pages(keys, pages), widen_pages(values, pages), table, tiles, options, out)


def over_e4m3_keys(q, keys, values, table, tiles, options, out) -> None:
    pages, own_table = step_pages(table)
    values = widen_pages(values, pages)
    hopper_prefill(q, keys, values, own_table, tiles, options, out, key_table=table)


@functools.cache
def step_pages(table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """All pages in the table's order, and where they lie then."""
    return table.flatten().long(), torch.arange(table.numel(), device="cuda").int().view(table.shape)


KERNELS = {
    "bfloat16": {"triton": prefill_attention, "hopper": hopper_prefill},
    "float16": {"triton": prefill_attention, "hopper": hopper_prefill},
    "float8_e4m3fn": {"widened": over_widened, "e4m3 keys": over_e4m3_keys},
}
"""By dtype of pages."""


def kernel_cell(name: str, requests: int, tokens: int, history: int, pages_dtype: str) -> dict:
    """bf16 pages; or with a scale a head fp16 ones, as fp8's become in large steps, or fp8's own."""
    dtype = getattr(torch, pages_dtype)
    count = -(-(tokens + history) // PAGE)
    q = torch.randn(requests * tokens, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    shape = (requests * count, KV_HEADS, PAGE, HEAD_DIM)
    pages = [torch.randn(shape, device="cuda").to(dtype) for _ in range(2)]
    table = torch.randperm(requests * count, device="cuda").int().view(requests, count)
    chunks = [(tokens, history, row) for row in range(requests)]
    tiles = torch.from_numpy(tiles_of(0, chunks, 0)).cuda()
    scales = {name: torch.rand(KV_HEADS, device="cuda") + 0.5 for name in ("key_scale", "value_scale")}
    options = AttentionOptions(HEAD_DIM**-0.5, **({} if dtype == torch.bfloat16 else scales))
    out = torch.empty_like(q)
    microseconds = graph_microseconds(
        [lambda: KERNELS[pages_dtype][name](q, *pages, table, tiles, options, out)] * 2, replays=7
    )
    places = torch.linspace(0, tokens - 1, CHECKED).long().tolist()
    few = torch.tensor([[place, 1, history + place, 0] for place in places], dtype=torch.int32)
    seen = rounded_queries(q.float()) if name == "e4m3 keys" else q
    want = prefill_attention_reference(seen, *pages, table, few, options)[places]
    error = float((out[places].double() - want).norm() / want.norm())
    operations = 4 * requests * HEADS * HEAD_DIM * tokens * (history + tokens / 2)
    return {
        "kernel": name,
        "requests": requests,
        "tokens": tokens,
        "history": history,
        "pages": pages_dtype,
        "microseconds": microseconds,
        "tflops": operations / microseconds / 1e6,
        "relative_error": error,
    }


def prompt_rates(kv_format: str, prompts: list[tuple[int, ...]], chunk: int | None) -> dict:
    """Prompt tokens a second, the median of three runs."""
    engine = engine_of(kv_format, MODEL, "cuda", [(count, length + 1) for count, length in prompts], chunk)
    rates = {}
    for count, length in prompts:
        taken = statistics.median(milliseconds(engine, count, length, 1) for _ in range(3))
        rates[f"{count}x{length}"] = count * length / taken * 1000
        print(f"{kv_format:>20} {count}x{length}: {rates[f'{count}x{length}']:.0f} tok/s", flush=True)
    return {"tokens_per_second": rates, "compilations": list(map(str, engine.stats().compilations))}


def numbers(cell: str) -> tuple[int, ...]:
    return tuple(map(int, cell.split("x")))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cells", nargs="*", default=CELLS, help="requests x tokens x history")
    parser.add_argument("--pages", nargs="*", choices=KERNELS, default=list(KERNELS), help="of kernels")
    parser.add_argument("--slots", type=int, default=prefill.E4M3_SLOTS, help="blocks ahead, e4m3 keys'")
    parser.add_argument("--formats", nargs="*", default=FORMATS)
    parser.add_argument("--prompts", nargs="+", default=PROMPTS, help="requests x tokens, of the engine")
    parser.add_argument("--prefill-chunk", type=int, help="tokens in a step; default the engine's own")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    prefill.E4M3_SLOTS = options.slots
    if options.alone:
        prompts = list(map(numbers, options.prompts))
        write_json(options.out, prompt_rates(options.formats[0], prompts, options.prefill_chunk))
        return
    result = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "kernels": [], "engine": {}}
    for pages in options.pages:
        for cell in map(numbers, options.cells):
            for name in KERNELS[pages]:
                row = kernel_cell(name, *cell, pages)
                result["kernels"].append(row)
                shown = (f"{value:.4g}" if isinstance(value, float) else value for value in row.values())
                print(*shown, flush=True)
    for name in options.formats:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "alone.json"
            own = ["--alone", "--formats", name, "--prompts", *options.prompts, "--out", str(out)]
            if options.prefill_chunk is not None:
                own += ["--prefill-chunk", str(options.prefill_chunk)]
            subprocess.run([sys.executable, "-P", __file__, *own], check=True)
            result["engine"][name] = json.loads(out.read_text(encoding="utf-8"))
        if options.out:
            write_json(options.out, result)
    if options.out:
        write_json(options.out, result)


if __name__ == "__main__":
    main()
