"""Decode attention over low-bit pages on a GPU, and writing pages: time, share of copy bandwidth, capacity.

    python -P tests/bench/kernels/low_bit_attention.py --out OUT/low_bit_attention.json

Attention is split and merge together, in a CUDA graph that rotates over pages of at least a gigabyte. Writing
is the launch that begins a decode step, with no page due, with one due and with one due for every request,
36 layers at once. Capacity is of whole requests beside bf16's, what they keep as it came counted.
"""

import argparse
from pathlib import Path

import torch
import triton
from scalegate.base.atomic_files import write_json
from scalegate.kernels.attention.decode import DecodeWorkspace
from scalegate.kernels.attention.kvarn.decode import kvarn_decode, plain_splits
from scalegate.kernels.attention.kvarn.flush import addresses, flush_decoded
from scalegate.kernels.attention.options import AttentionOptions
from scalegate.kernels.attention.per_token.decode import token_decode
from scalegate.layouts.kv.format import KV_FORMATS, KVFormat
from scalegate.layouts.kv.kvarn.kvarn import KVarN
from scalegate.layouts.kv.layer import KVShape, PoolSize, Workspaces
from scalegate.tests.bench.kernels.attention import (
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    copy_bandwidth,
    graph_microseconds,
)

SHAPE = KVShape(KV_HEADS, HEAD_DIM, HEAD_DIM, torch.bfloat16, HEADS)
FORMATS = ("kvarn_k4v2_g128", "kvarn_k4v4_g128", "kvarn_k4v2_g64", "int4_per_token_head", "nvfp4")
CELLS = ((8, 4096), (32, 4096), (64, 4096), (8, 16384), (32, 16384), (96, 16384))
MAX_CONTEXT = 16384
LEAST_BYTES = 1 << 30
LAYERS = 36
CUDA = torch.device("cuda")


def measure(name: str, batch: int, context: int, copy: float) -> dict:
    form = KV_FORMATS[name]
    page = form.page_size(CUDA)
    per_request = triton.cdiv(context, page)
    page_bytes = form.bytes_per_page(SHAPE, page)
    copies = max(1, triton.cdiv(LEAST_BYTES, per_request * batch * page_bytes))
    pages = per_request * batch * copies
    layer = form.allocate(SHAPE, PoolSize(pages, page, batch, per_request), CUDA, None, Workspaces())
    fill(layer, form)
    tables = torch.randperm(pages, device="cuda").int().view(copies, batch, per_request)
    lengths = torch.full((batch,), context, dtype=torch.int32, device="cuda")
    rows = torch.arange(batch, device="cuda")
    is_kvarn = isinstance(form, KVarN)
    # Where a format rotates queries beforehand, they come in fp16.
    q = torch.randn(batch, HEADS, HEAD_DIM, device="cuda", dtype=SHAPE.dtype if is_kvarn else torch.float16)
    turned_q, out = q.half(), torch.empty_like(q, dtype=SHAPE.dtype)
    further = plain_splits(page) if is_kvarn else 0
    workspace = DecodeWorkspace.allocate(batch, HEADS, HEAD_DIM, MAX_CONTEXT, "cuda", further)

    options = AttentionOptions(0.05)

    def call(table: torch.Tensor) -> None:
        if isinstance(form, KVarN):
            storage = layer.storage
            where = storage.pages, storage.held, table, lengths, rows, workspace
            kvarn_decode(q, turned_q, *where, value_bits=form.value_bits, options=options, out=out)
        else:
            where = layer.keys, layer.values, table, lengths, workspace
            token_decode(q, *where, rotated=layer.rotated, options=options, out=out)

    calls = [lambda table=table: call(table) for table in tables]
    microseconds = graph_microseconds(calls * max(1, 8 // copies))
    held = form.bytes_per_request(SHAPE)
    coded = per_request - 2 if isinstance(form, KVarN) else per_request
    read = batch * (coded * page_bytes + held)
    return {
        "kv_format": name,
        "batch": batch,
        "context": context,
        "kv_bytes": read,
        "microseconds": microseconds,
        "of_copy": read / microseconds * 1e6 / copy,
    }


def fill(layer: object, form: KVFormat) -> None:
    """Any codes, with scales as they would be; speed does not depend on them."""
    if isinstance(form, KVarN):
        pages = layer.storage.pages
        words, scales = [pages.key_words, pages.value_words], [pages.channels, pages.tokens]
    else:
        sides = layer.keys, layer.values
        words, scales = [side.words for side in sides], [side.scales for side in sides]
    for part in words:
        part.random_(-(1 << 15), 1 << 15)
    for part in scales:
        part.copy_(torch.full(part.shape, 0.25, device="cuda"))


def flush_times(name: str, batch: int) -> dict:
    """Microseconds of one step's launch over all layers."""
    form = KV_FORMATS[name]
    group = form.group_size
    size = PoolSize(4 * batch, group, batch, 4)
    layers = [form.allocate(SHAPE, size, CUDA, None, Workspaces()) for _ in range(LAYERS)]
    for layer in layers:
        layer.storage.held.normal_()
    table = addresses([(layer.storage.pages, layer.storage.held) for layer in layers], CUDA)
    blocks = torch.arange(4 * batch, device="cuda", dtype=torch.int32).view(batch, 4)
    rows = torch.arange(batch, device="cuda")
    held = layers[0].storage.held
    written = torch.full((batch + 1,), -1, dtype=torch.int32, device="cuda")
    times = {}
    for due in (0, 1, batch):
        lengths = torch.full((batch,), 2 * group + 2, dtype=torch.int32, device="cuda")
        lengths[:due] -= 1
        run = [
            lambda lengths=lengths: flush_decoded(
                table, lengths, rows, blocks, held, written, form.value_bits
            )
        ]
        times[str(due)] = graph_microseconds(run * 4)
    return {"kv_format": name, "batch": batch, "layers": LAYERS, "microseconds_by_due": times}


def capacity(name: str, context: int) -> float:
    """Requests of `context` tokens in the memory that one takes in bf16."""
    form, plain = KV_FORMATS[name], KV_FORMATS["unquantized"]
    page, plain_page = form.page_size(CUDA), plain.page_size(CUDA)
    own = triton.cdiv(context, page) * form.bytes_per_page(SHAPE, page) + form.bytes_per_request(SHAPE)
    return triton.cdiv(context, plain_page) * plain.bytes_per_page(SHAPE, plain_page) / own


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--formats", nargs="+", default=list(FORMATS))
    options = parser.parse_args()
    copy = copy_bandwidth()
    result = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "copy_bytes_per_second": copy,
        "capacity_at_4k": {name: capacity(name, 4096) for name in options.formats},
        "flush": [flush_times(name, 128) for name in options.formats if name.startswith("kvarn")],
        "attention": [],
    }
    print(f"{result['device']}: copy {copy / 1e12:.2f} TB/s; requests of 4k beside bf16's, writing in µs:")
    print({name: round(value, 2) for name, value in result["capacity_at_4k"].items()})
    for timing in result["flush"]:
        print(
            timing["kv_format"], {due: round(time, 1) for due, time in timing["microseconds_by_due"].items()}
        )
    for name in options.formats:
        for batch, context in CELLS:
            row = measure(name, batch, context, copy)
            result["attention"].append(row)
            write_json(options.out, result)
            torch.cuda.empty_cache()
            print(
                f"{name:>20} {context:>6} x {batch:<3} {row['kv_bytes'] / 1e9:>6.2f} GB "
                f"{row['microseconds']:>8.1f} µs {row['of_copy']:>5.0%} of copy",
                flush=True,
            )


if __name__ == "__main__":
    main()
