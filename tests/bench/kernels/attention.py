"""Decode attention's bandwidth on a GPU, beside the copy bandwidth of the same run; checked on the same data.

    python tests/bench/kernels/attention.py --out OUT/attention.json

Each cell rotates over enough pages to leave the L2 cache, in a CUDA graph, and is the median of its replays.
"""

import argparse
import json
import statistics
from pathlib import Path

import torch
import triton
from scalegate.kernels.attention.decode import DecodeWorkspace, decode_attention, decode_attention_reference
from scalegate.kernels.attention.options import AttentionOptions

HEADS, KV_HEADS, HEAD_DIM, PAGE = 32, 8, 128, 64
CACHE_BYTES = 256 << 20


def graph_microseconds(run, replays: int = 20) -> float:
    """Median time of one call of each function in `run`, replayed together in a graph."""
    for call in run[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in run:
            call()
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / len(run))
    return statistics.median(times)


def copy_bandwidth() -> float:
    """Bytes a second, read and written both counted, of the fastest of three ways to copy 4 GB."""
    source = torch.empty(1 << 30, dtype=torch.float32, device="cuda").normal_()
    target = torch.empty_like(source)
    half_source, half_target = source.view(torch.bfloat16), target.view(torch.bfloat16)
    ways = [
        lambda: target.copy_(source),
        lambda: torch.neg(source, out=target),
        lambda: torch.neg(half_source, out=half_target),
    ]
    return 2 * source.nbytes / (min(graph_microseconds([way]) for way in ways) * 1e-6)


def make_pages(pages: int, dtype: torch.dtype):
    shape = (pages, KV_HEADS, PAGE, HEAD_DIM)
    keys = torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_()
    values = torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_()
    if dtype == torch.bfloat16:
        return keys, values, {}
    if dtype == torch.int8:
        scales = {
            name: torch.rand(shape[:3], device="cuda") * 0.01 + 0.02 for name in ("key_scale", "value_scale")
        }
        return (keys * 30).to(dtype), (values * 30).to(dtype), scales
    scales = {name: torch.rand(KV_HEADS, device="cuda") + 0.5 for name in ("key_scale", "value_scale")}
    return keys.to(dtype), values.to(dtype), scales


def measure(batch: int, context: int, dtype: torch.dtype, max_context: int) -> dict:
    per_request = triton.cdiv(context, PAGE)
    bytes_a_call = 2 * batch * context * KV_HEADS * HEAD_DIM * dtype.itemsize
    copies = max(1, min(16, triton.cdiv(CACHE_BYTES, bytes_a_call)))
    keys, values, scales = make_pages(per_request * batch * copies, dtype)
    tables = (
        torch.randperm(per_request * batch * copies, device="cuda").int().view(copies, batch, per_request)
    )
    lengths = torch.full((batch,), context, dtype=torch.int32, device="cuda")
    q = torch.randn(batch, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    workspace = DecodeWorkspace.allocate(batch, HEADS, HEAD_DIM, max_context, "cuda")
    options = AttentionOptions(HEAD_DIM**-0.5, **scales)
    calls = [
        lambda table=table: decode_attention(q, keys, values, table, lengths, workspace, options)
        for table in tables
    ]
    microseconds = graph_microseconds(calls * max(1, 8 // copies))
    few = slice(0, min(batch, 2))
    workspace.partial.fill_(float("nan"))
    got = calls[0]()[few].double()
    want = decode_attention_reference(q[few], keys, values, tables[0, few], lengths[few], options)
    return {
        "batch": batch,
        "context": context,
        "kv_dtype": str(dtype).removeprefix("torch."),
        "kv_bytes": bytes_a_call,
        "microseconds": microseconds,
        "bytes_per_second": bytes_a_call / microseconds * 1e6,
        "relative_error": float((got - want).norm() / want.norm()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--max-context", type=int, default=32768)
    options = parser.parse_args()
    copy = copy_bandwidth()
    rows = []
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.int8):
        for context in (1024, 4096, 16384, 32768):
            for batch in (1, 8, 32, 128):
                if 2 * batch * context * KV_HEADS * HEAD_DIM * dtype.itemsize <= 24 << 30:
                    rows.append(measure(batch, context, dtype, options.max_context))
                    torch.cuda.empty_cache()
    result = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "shape": {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "page": PAGE},
        "max_context": options.max_context,
        "copy_bytes_per_second": copy,
        "rows": rows,
    }
    if options.out:
        options.out.write_text(json.dumps(result, indent=2) + "\n")
    print(f"{result['device']}: copy {copy / 1e12:.2f} TB/s")
    print("            kv  context  batch   KV GB        us   TB/s  of copy    error")
    for row in rows:
        print(
            f"{row['kv_dtype']:>14} {row['context']:>8} {row['batch']:>6} {row['kv_bytes'] / 1e9:>7.2f} "
            f"{row['microseconds']:>9.1f} {row['bytes_per_second'] / 1e12:>6.2f} "
            f"{row['bytes_per_second'] / copy:>8.0%} {row['relative_error']:>8.1e}"
        )


if __name__ == "__main__":
    main()
