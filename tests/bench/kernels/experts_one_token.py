"""Times a layer of INT4 experts for one decoding token: two launches of its own beside grouped products.

    python -P tests/bench/kernels/experts_one_token.py --out OUT/experts_one_token.json

Qwen3-30B-A3B's shape, INT4 in groups of 128, weights and routings of `experts.py`, in CUDA graphs. A layer is
all from the router's answer to the sum over experts: routing, products, SiLU, sum. Every tuning of
`kernels/experts/one_token.py` is timed whole and by launch; a launch alone has another one of its kind ahead.
Answers are compared with fp32 first, and with themselves. `grouped bf16` is the unquantized layer.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import triton
from scalegate.base.atomic_files import write_json
from scalegate.kernels.experts import gated, one_token, unquantized
from scalegate.kernels.experts.one_token import Int4Operand, Tuning
from scalegate.kernels.experts.routing import route
from scalegate.layouts.choosing.timing import TimingBudget, interleaved_microseconds
from scalegate.tests.bench.kernels.experts import (
    DEVICE,
    EXPERTS,
    GROUP_SIZE,
    HIDDEN,
    INTERMEDIATE,
    LAYERS,
    ROUTINGS,
    SHAPES,
    TOP_K,
    dense_weights,
    int4_weights,
    random_routings,
)
from scalegate.tests.kernels.experts.tunings import CANDIDATES
from torch import Tensor

MAX_ERROR = 4e-3
PRESENT, UNQUANTIZED = "grouped INT4", "grouped bf16"
WEIGHT_BYTES = TOP_K * 3 * HIDDEN * INTERMEDIATE * (4 + 32 / GROUP_SIZE) / 8


def operands() -> list[tuple[Int4Operand, Int4Operand]]:
    packed = int4_weights()
    return [
        tuple(Int4Operand(*packed[name][i], *SHAPES[name], GROUP_SIZE, False) for name in SHAPES)
        for i in range(LAYERS)
    ]


def unquantized_layer(x: Tensor, expert: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    routing = route(expert, EXPERTS)
    y = gated.silu_and_multiply(unquantized.grouped_matmul(x, gate_up, routing))
    return gated.weighted_sum(unquantized.grouped_matmul(y, down, routing), weight)


def name_of(tuning: Tuning) -> str:
    fetched = "prefetch" if tuning.prefetch else "no prefetch"
    return f"gate_up /{tuning.gate_up_splits}, down /{tuning.down_splits}, {fetched}"


def errors(x: Tensor, experts: list[Tensor], weight: Tensor, layers: list) -> dict[str, float]:
    """The largest of each way, over all layers and routings, into poisoned memory."""
    ways: dict[str, Callable] = {PRESENT: gated.grouped_experts}
    ways |= {
        name_of(tuning): lambda *given, tuning=tuning: one_token.experts(*given, tuning)
        for tuning in CANDIDATES
    }
    found = dict.fromkeys(ways, 0.0)
    for i in range(ROUTINGS):
        given = x, experts[i], weight, *layers[i % LAYERS]
        expected = one_token.experts_reference(*given).float()
        for name, way in ways.items():
            for shape in ((TOP_K, INTERMEDIATE), (1, HIDDEN)):
                torch.full(shape, float("nan"), device=DEVICE, dtype=x.dtype)
            y = way(*given)
            if not torch.equal(y, way(*given)):
                raise SystemExit(f"{name}: the same token gives other bits")
            found[name] = max(found[name], float((y.float() - expected).norm() / expected.norm()))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    layers, dense, experts = operands(), dense_weights(), random_routings(1)
    x = torch.randn(1, HIDDEN, device=DEVICE, dtype=torch.bfloat16)
    weight = torch.rand(1, TOP_K, device=DEVICE).softmax(1).to(torch.bfloat16)
    activation = torch.randn(TOP_K, INTERMEDIATE, device=DEVICE, dtype=torch.bfloat16)
    wrong = errors(x, experts, weight, layers)

    def dense_call(i: int) -> Tensor:
        return unquantized_layer(x, experts[i], weight, *(dense[name][i % LAYERS] for name in SHAPES))

    calls: dict[str, Callable[[int], object]] = {
        PRESENT: lambda i: gated.grouped_experts(x, experts[i], weight, *layers[i % LAYERS]),
        UNQUANTIZED: dense_call,
    }
    for tuning in CANDIDATES:

        def whole(i: int, tuning: Tuning = tuning) -> Tensor:
            return one_token.experts(x, experts[i], weight, *layers[i % LAYERS], tuning)

        def first(i: int, tuning: Tuning = tuning) -> Tensor:
            return one_token.launch_gate_up(x, experts[i], *layers[i % LAYERS], tuning)

        def second(i: int, tuning: Tuning = tuning) -> Tensor:
            return one_token.launch_down(activation, experts[i], weight, layers[i % LAYERS][1], tuning)

        name = name_of(tuning)
        calls |= {name: whole, f"{name}: gate_up": first, f"{name}: down": second}

    def report(name: str, error: Exception) -> None:
        print(f"{name} failed: {str(error)[:200]}", flush=True)

    times = interleaved_microseconds(calls, ROUTINGS, DEVICE, TimingBudget(seconds=4.0), report)
    floor = WEIGHT_BYTES / 4.4e6
    print(f"\n{'one token, us':<40}{'layer':>7}{'gate_up':>9}{'down':>7}{'bf16/this':>11}{'error':>10}")
    for name in (PRESENT, UNQUANTIZED, *map(name_of, CANDIDATES)):
        parts = (times.get(f"{name}: {part}", float("nan")) for part in ("gate_up", "down"))
        us = times.get(name, float("nan"))
        print(
            f"{name:<40}{us:>7.2f}{next(parts):>9.2f}{next(parts):>7.2f}"
            f"{times[UNQUANTIZED] / us:>11.3f}{wrong.get(name, 0.0):>10.1e}"
        )
    print(f"bytes of the INT4 weights at 4.4 TB/s: {floor:.1f} us", flush=True)
    if options.out is not None:
        told = {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "errors": wrong,
            "us": times,
        }
        write_json(options.out, told)
    bad = [name for name, error in wrong.items() if not error <= MAX_ERROR and name != PRESENT]
    if bad:
        sys.exit(f"WRONG: {bad}")


if __name__ == "__main__":
    main()
