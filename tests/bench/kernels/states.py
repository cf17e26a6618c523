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
from types import ModuleType

import torch
import triton
from scalegate.base.atomic_files import write_json
from scalegate.kernels.states.batch import StateBatch
from scalegate.kernels.states.gated_delta_rule import gated_delta_rule
from scalegate.layouts.states.gated_delta_rule import DeltaInputs, GatedDeltaRule
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

    before = slots.clone()
    ours(batches[0])
    errors = []
    for index in range(min(requests, CHECKED)):
        state = before[batches[0].request_rows[index]]
        part = inputs.part(slice(index * tokens, (index + 1) * tokens))
        kind = GatedDeltaRule()
        wanted = kind.step(part, state[None]) if tokens == 1 else kind.scan(part, state.zero_())
        errors.append(relative_error(output[index * tokens : (index + 1) * tokens], wanted))
        errors.append(relative_error(slots[batches[0].request_rows[index]], state))

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
        max(errors),
        {"vllm": vllm},
    )


KINDS: dict[str, Callable[[int, int], Work]] = {"gated_delta_rule": gated_delta}


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
