"""Kernels over states on a GPU, by kind of state: steps and prompts; checked against torch on the same data.

    python -P tests/bench/kernels/states.py --out OUT/states.json
    python -P tests/bench/kernels/states.py --kinds gated_delta_rule --cells 128x1 1x2048

A cell is requests x tokens; all tokens of a step are in one launch, recorded in a CUDA graph. Of one token a
request the table says how much of the card's copy speed, measured in the same call, the bytes of states need:
all are read and written once, and lie outside the L2 cache. Peers are timed in the same call where they can
be imported.
"""

import argparse
import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import triton
from scalegate.base.atomic_files import write_json
from scalegate.kernels.states.batch import StateBatch
from scalegate.kernels.states.gated_delta_rule import gated_delta_rule
from scalegate.kernels.states.mamba2 import mamba2
from scalegate.kernels.states.short_convolution import short_convolution
from scalegate.layouts.states.gated_delta_rule import DeltaInputs, GatedDeltaRule
from scalegate.layouts.states.mamba2 import Mamba2, Mamba2Inputs
from scalegate.layouts.states.short_convolution import ConvolutionInputs, ShortConvolution
from scalegate.layouts.states.state_format import StateFormat, StateInputs
from scalegate.tests.bench.kernels.attention import copy_bandwidth, graph_microseconds
from torch import Tensor
from torch.nn.functional import softplus

CELLS = ["1x1", "8x1", "16x1", "64x1", "128x1", "1x2048", "32x64"]
ROWS = 128
"""Slots of a layer; with fewer requests each launch has other ones."""
CHECKED = 2
"""Requests that are compared with torch."""

Launches = list[Callable[[], object]]


@dataclass
class Work:
    """One cell's launches, and who has done them how well."""

    ours: Launches
    state_bytes: int
    """That one launch reads and writes."""
    error: float
    """Of outputs and states, relative to torch's."""
    peers: dict[str, Callable[[], Launches]] = field(default_factory=dict)
    """Functions that import a peer and return its launches."""


def gated_delta(requests: int, tokens: int) -> Work:
    """Qwen3-Next's shapes."""
    key_heads, heads, dim = 16, 32, 128
    total = requests * tokens
    query, key = (torch.randn(total, key_heads, dim, device="cuda").bfloat16() for _ in range(2))
    value = torch.randn(total, heads, dim, device="cuda").bfloat16()
    log_decay = -0.1 * softplus(torch.randn(total, heads, device="cuda"))
    rate = torch.randn(total, heads, device="cuda").sigmoid().bfloat16()
    slots = torch.randn(ROWS, heads, dim, dim, device="cuda")
    inputs = DeltaInputs(query, key, value, log_decay, rate)
    output = torch.empty_like(value)
    batches = batches_of(requests, tokens)

    def ours(batch: StateBatch) -> None:
        gated_delta_rule(query, key, value, log_decay, rate, slots, batch, output)

    error = error_of(GatedDeltaRule(), inputs, slots, partial(ours, batches[0]), output, batches[0])

    def vllm() -> Launches:
        ops = flash_linear_attention()
        given = {
            "q": query[None],
            "k": key[None],
            "v": value[None],
            "g": log_decay[None],
            "beta": rate[None],
            "use_qk_l2norm_in_kernel": True,
        }

        def step(batch: StateBatch, rows: Tensor) -> None:
            ops.fused_recurrent_gated_delta_rule(
                **given,
                initial_state=slots,
                inplace_final_state=True,
                cu_seqlens=batch.query_start_loc,
                ssm_state_indices=rows,
            )

        def scan(batch: StateBatch) -> None:
            ops.chunk_gated_delta_rule(
                **given,
                initial_state=zeros,
                output_final_state=True,
                cu_seqlens=batch.query_start_loc,
            )

        if tokens == 1:
            return [partial(step, batch, batch.request_rows.int()) for batch in batches]
        zeros = torch.zeros(requests, heads, dim, dim, device="cuda")
        return [partial(scan, batches[0])] * len(batches)

    return Work(
        [partial(ours, batch) for batch in batches],
        2 * requests * slots[0].nbytes,
        error,
        {"vllm": vllm},
    )


def mamba2_scan(requests: int, tokens: int) -> Work:
    """Nemotron-H's shapes: views of one projection."""
    heads, head_dim, groups, state_dim = 128, 64, 8, 128
    total = requests * tokens
    sizes = [heads * head_dim, groups * state_dim, groups * state_dim]
    joined = torch.randn(total, sum(sizes), device="cuda").bfloat16()
    x, b, c = (
        part.unflatten(1, (count, -1))
        for part, count in zip(joined.split(sizes, 1), (heads, groups, groups), strict=True)
    )
    step = softplus(torch.randn(total, heads, device="cuda")).bfloat16()
    a, d = -torch.rand(heads, device="cuda"), torch.randn(heads, device="cuda").bfloat16()
    slots = torch.randn(ROWS, heads, head_dim, state_dim, device="cuda")
    inputs = Mamba2Inputs(x, step, b, c, a, d)
    output = torch.empty(x.shape, dtype=x.dtype, device="cuda")
    batches = batches_of(requests, tokens)

    def ours(batch: StateBatch) -> None:
        mamba2(x, step, b, c, a, d, slots, batch, output)

    error = error_of(Mamba2(), inputs, slots, partial(ours, batches[0]), output, batches[0])

    def vllm() -> Launches:
        from vllm.model_executor.layers.mamba.ops.mamba_ssm import selective_state_update
        from vllm.model_executor.layers.mamba.ops.ssd_combined import mamba_chunk_scan_combined_varlen

        rows = [batch.request_rows.int() for batch in batches]
        if tokens == 1:
            by_channel = (
                step[:, :, None].expand(-1, -1, head_dim),
                a[:, None, None].expand(-1, head_dim, state_dim),
            )
            skip = d[:, None].expand(-1, head_dim)
            bias = torch.zeros_like(a)[:, None].expand(-1, head_dim)

            def update(row: Tensor) -> None:
                selective_state_update(
                    slots, x, *by_channel, b, c, skip, bias,
                    state_batch_indices=row, null_block_id=-1, out=output,
                )  # fmt: skip

            return [partial(update, row) for row in rows]
        starts = batches[0].query_start_loc
        size = min(tokens, 128)
        chunks = torch.arange(0, total + 1, size, dtype=torch.int32, device="cuda")
        last = (starts[1:] // size - 1).int()
        of_chunk = (chunks[:-1] // tokens).int()

        def scan(batch: StateBatch) -> None:
            slots[batch.request_rows] = mamba_chunk_scan_combined_varlen(
                x, step, a, b, c, 128, starts, chunks, last, of_chunk, output, D=d, state_dtype=torch.float32
            )

        return [partial(scan, batch) for batch in batches]

    return Work(
        [partial(ours, batch) for batch in batches],
        2 * requests * slots[0].nbytes,
        error,
        {"vllm": vllm},
    )


def convolution(requests: int, tokens: int) -> Work:
    """Nemotron-H's channels."""
    channels, width = 10304, 4
    total = requests * tokens
    x = torch.randn(total, channels + 64, device="cuda").bfloat16()[:, :channels]
    weight = torch.randn(channels, width, device="cuda").bfloat16()
    bias = torch.randn(channels, device="cuda").bfloat16()
    slots = torch.randn(ROWS, channels, width - 1, device="cuda").bfloat16()
    inputs = ConvolutionInputs(x, weight.float(), bias.float())
    output = torch.empty(total, channels, dtype=x.dtype, device="cuda")
    batches = batches_of(requests, tokens)

    def ours(batch: StateBatch) -> None:
        short_convolution(x, weight, bias, slots, batch, output)

    error = error_of(ShortConvolution(), inputs, slots, partial(ours, batches[0]), output, batches[0])

    def vllm() -> Launches:
        from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_fn, causal_conv1d_update

        rows = [batch.request_rows.int() for batch in batches]
        # In vLLM's order, with contiguous channels.
        theirs = slots.mT.contiguous().mT
        if tokens == 1:
            new = x.clone()
            return [
                partial(
                    causal_conv1d_update, new, theirs, weight, bias, conv_state_indices=row, null_block_id=-1
                )
                for row in rows
            ]
        block = 8
        request = torch.arange(requests, device="cuda").repeat_interleave(tokens // block).int()
        offset = torch.arange(tokens // block, device="cuda").repeat(requests).int()
        programs = {"tot": len(request), "mlist": request, "mlist_len": len(request), "offsetlist": offset}
        programs |= {"batch_ptr": request, "token_chunk_offset_ptr": offset}
        metadata = SimpleNamespace(
            nums_dict={block: programs}, batch_ptr=request, token_chunk_offset_ptr=offset
        )
        begins = torch.zeros(requests, dtype=torch.bool, device="cuda")
        return [
            partial(
                causal_conv1d_fn, x.T, weight, bias, theirs, batches[0].query_start_loc, row, begins, None,
                null_block_id=-1, metadata=metadata,
            )
            for row in rows
        ]  # fmt: skip

    new = total * channels * 2 * x.element_size()
    return Work(
        [partial(ours, batch) for batch in batches],
        2 * requests * slots[0].nbytes + new,
        error,
        {"vllm": vllm},
    )


KINDS: dict[str, Callable[[int, int], Work]] = {
    "gated_delta_rule": gated_delta,
    "mamba2": mamba2_scan,
    "short_convolution": convolution,
}


def flash_linear_attention() -> ModuleType:
    """vLLM's copy of flash-linear-attention, which moved in 0.26."""
    try:
        return importlib.import_module("vllm.third_party.flash_linear_attention.ops")
    except ModuleNotFoundError:
        return importlib.import_module("vllm.model_executor.layers.fla.ops")


def batches_of(requests: int, tokens: int) -> list[StateBatch]:
    """Batches of requests with the same number of tokens, which have all slots between them, each once.

    Requests with one token have a state; the others begin.
    """
    starts = torch.arange(requests + 1, dtype=torch.int32, device="cuda") * tokens
    lengths = torch.full((requests,), tokens + (tokens == 1), dtype=torch.int32, device="cuda")
    rows = torch.randperm(ROWS, device="cuda").split(requests)
    return [
        StateBatch(starts, lengths, some, decode_only=tokens == 1) for some in rows if len(some) == requests
    ]


def error_of(
    kind: StateFormat[Any],
    inputs: StateInputs,
    slots: Tensor,
    ours: Callable[[], None],
    output: Tensor,
    batch: StateBatch,
) -> float:
    """The largest relative error of some requests' outputs and states after a first launch."""
    before = slots.clone()
    ours()
    tokens = len(output) // len(batch.seq_lens)
    errors = []
    for index, row in enumerate(batch.request_rows[:CHECKED].tolist()):
        state = before[row]
        part = slice(index * tokens, (index + 1) * tokens)
        if tokens == 1:
            wanted = kind.step(inputs.part(part), state[None])
        else:
            wanted = kind.scan(inputs.part(part), state.zero_())
        errors += [relative_error(output[part], wanted), relative_error(slots[row], state)]
    return max(errors)


def relative_error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def peer_microseconds(launches: Callable[[], Launches]) -> float | str:
    """The peer's time, or why there is none."""
    try:
        return graph_microseconds(launches())
    except ImportError as error:
        return f"not here: {error}"
    except Exception as error:  # A peer that fails in one cell is no reason to lose the others.
        torch.cuda.synchronize()
        return f"fails: {type(error).__name__}: {str(error).strip()[:200]}"


def measure(kind: str, requests: int, tokens: int, copy: float) -> dict:
    work = KINDS[kind](requests, tokens)
    microseconds = graph_microseconds(work.ours)
    peers = {name: peer_microseconds(launches) for name, launches in work.peers.items()}
    row = {
        "kind": kind,
        "requests": requests,
        "tokens": tokens,
        "microseconds": microseconds,
        "relative_error": work.error,
        "share_of_copy": work.state_bytes / copy * 1e6 / microseconds if tokens == 1 else None,
        "peers": peers,
    }
    share = f"{row['share_of_copy']:>6.0%} of copy" if tokens == 1 else ""
    shown = ", ".join(
        f"{name} {taken:.1f}" if isinstance(taken, float) else f"{name} {taken}"
        for name, taken in peers.items()
    )
    print(
        f"{kind:>18} {requests:>4}x{tokens:<5} {microseconds:>9.1f} us {share:>14} "
        f"error {work.error:.1e}   {shown}",
        flush=True,
    )
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--cells", nargs="+", default=CELLS, help="requests x tokens")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    copy = copy_bandwidth()
    torch.cuda.empty_cache()
    print(f"{torch.cuda.get_device_name()}: copy {copy / 1e12:.2f} TB/s", flush=True)
    rows = []
    for kind in options.kinds:
        for cell in options.cells:
            requests, tokens = map(int, cell.split("x"))
            rows.append(measure(kind, requests, tokens, copy))
            if options.out:
                result = {
                    "device": torch.cuda.get_device_name(),
                    "torch": torch.__version__,
                    "triton": triton.__version__,
                    "copy_bytes_per_second": copy,
                    "rows": rows,
                }
                write_json(options.out, result)


if __name__ == "__main__":
    main()
