"""Times a layer of experts in block FP8 beside vLLM's kernel and DeepGEMM's: DeepSeek-V3's shape.

    python -P tests/bench/kernels/block_experts.py --vllm FOLDER --out OUT/block_experts.json
    python -P tests/bench/kernels/block_experts.py --vllm FOLDER --shape eight-ranks

A layer is what follows the router: inputs rounded in groups of 128, both products, SiLU times up, and the sum
of a token's experts by weight. vLLM's is `fused_experts`, with its own table of tiles. DeepGEMM has grouped
products alone: both are timed on inputs that are rounded and sorted already, so its figure is a bound for a
layer, not a layer. Calls run in CUDA graphs, interleaved, with other routings in turn. Each layer's answer is
first compared with one in float32. Not for whole models.
"""

import argparse
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from scalegate.base.atomic_files import write_json
from scalegate.kernels.experts import fp8
from scalegate.kernels.experts.gated import silu_and_multiply, weighted_sum
from scalegate.kernels.experts.routing import route
from scalegate.kernels.fp8.round_rows import round_rows
from scalegate.layouts.choosing.timing import TimingBudget, interleaved_microseconds
from scalegate.layouts.formats.e4m3 import PER_BLOCK
from torch import Tensor
from torch.nn import functional

TOP_K, BLOCK, ROUTINGS = 8, 128, 8
TOKENS = (1, 8, 16, 64, 128, 512, 1024, 4096)
MAX_ERROR = 1e-2
"""Relative, of a layer: bf16 is rounded twice, and inputs near the middle of two codes may take the other."""
DEVICE = torch.device("cuda")


@dataclass(frozen=True)
class Shape:
    experts: int
    hidden: int
    inner: int


SHAPES = {"whole": Shape(256, 7168, 2048), "eight-ranks": Shape(256, 7168, 256)}
"""DeepSeek-V3's experts on one GPU, and each one's share if eight GPUs have an eighth of every expert."""


@dataclass(frozen=True)
class Weights:
    """codes E4M3 [E, N, K], scales fp32 [E, N/128, K/128] of gate_up and down."""

    gate_up: Tensor
    gate_up_scale: Tensor
    down: Tensor
    down_scale: Tensor

    def rows(self) -> tuple[Tensor, Tensor]:
        """Scales by row, [E, K/128, N], as our kernel takes them."""
        by_row = (scale.repeat_interleave(BLOCK, 1) for scale in (self.gate_up_scale, self.down_scale))
        gate_up, down = (scale.transpose(1, 2).contiguous() for scale in by_row)
        return gate_up, down


def random_weights(shape: Shape) -> Weights:
    def random(n: int, k: int) -> tuple[Tensor, Tensor]:
        codes = torch.empty(shape.experts, n, k, dtype=torch.float8_e4m3fn, device=DEVICE)
        for expert in codes:
            expert.copy_(torch.randn(n, k, device=DEVICE).mul(100).clamp(-448, 448))
        scale = torch.rand(shape.experts, n // BLOCK, k // BLOCK, device=DEVICE).add(0.5)
        return codes, scale * (0.01 / k**0.5)

    return Weights(*random(2 * shape.inner, shape.hidden), *random(shape.hidden, shape.inner))


def our_layer(
    x: Tensor, weights: Weights, rows: tuple[Tensor, Tensor], chosen: list[Tensor], share: Tensor, i: int
) -> Tensor:
    routing = route(chosen[i], len(weights.down))
    first = fp8.grouped_matmul(*round_rows(x, in_groups=True), weights.gate_up, rows[0], routing, x.dtype)
    inner = round_rows(silu_and_multiply(first), in_groups=True)
    return weighted_sum(fp8.grouped_matmul(*inner, weights.down, rows[1], routing, x.dtype), share)


def vllm_layer(x: Tensor, weights: Weights, chosen: list[Tensor], share: Tensor, i: int) -> Tensor:
    from vllm.model_executor.layers.fused_moe.config import fp8_w8a8_moe_quant_config
    from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts

    config = fp8_w8a8_moe_quant_config(
        w1_scale=weights.gate_up_scale, w2_scale=weights.down_scale, block_shape=[BLOCK, BLOCK]
    )
    return fused_experts(
        x, weights.gate_up, weights.down, share, chosen[i].to(torch.int32), quant_config=config
    )


def deepgemm_products(weights: Weights, chosen: list[Tensor]) -> Callable[[int], None]:
    """Both products on random inputs, sorted by expert, each expert's rows filled up as DeepGEMM asks."""
    import deep_gemm

    unit = deep_gemm.get_mk_alignment_for_contiguous_layout()
    layouts: list[Tensor] = []
    for expert in chosen:
        counts = torch.bincount(expert.flatten(), minlength=len(weights.down)).tolist()
        of_rows = [index for index, count in enumerate(counts) for _ in range(-(-count // unit) * unit)]
        layouts.append(torch.tensor(of_rows, dtype=torch.int32, device=DEVICE))
    operands, most = [], max(map(len, layouts))
    for weight, scale in ((weights.gate_up, weights.gate_up_scale), (weights.down, weights.down_scale)):
        x = torch.randn(most, weight.shape[2], device=DEVICE, dtype=torch.bfloat16)
        codes, of_x = round_rows(x, in_groups=True)
        # As it wants them, so that nothing is transposed: along M, without a gap.
        scales = [of_x[:, : len(layout)].contiguous().t() for layout in layouts]
        y = torch.empty(most, weight.shape[1], device=DEVICE, dtype=torch.bfloat16)
        operands.append((codes, scales, weight, scale, y))

    def multiply(i: int) -> None:
        rows = len(layouts[i])
        for codes, scales, weight, scale, y in operands:
            deep_gemm.m_grouped_fp8_gemm_nt_contiguous(
                (codes[:rows], scales[i]), (weight, scale), y[:rows], layouts[i]
            )

    return multiply


def error_of(y: Tensor, x: Tensor, weights: Weights, expert: Tensor, share: Tensor, tokens: int = 4) -> float:
    """Relative, of the first tokens."""

    def dense(codes: Tensor, scale: Tensor) -> Tensor:
        return codes.float() * scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)

    wrong = whole = 0.0
    for token in range(min(tokens, len(x))):
        expected = torch.zeros(x.shape[1], device=DEVICE)
        rounded = PER_BLOCK.round(x[token].float())
        for taken, index in enumerate(expert[token].tolist()):
            gate, up = (dense(weights.gate_up[index], weights.gate_up_scale[index]) @ rounded).chunk(2)
            inner = PER_BLOCK.round((functional.silu(gate.bfloat16().float()) * up.bfloat16()).bfloat16())
            row = dense(weights.down[index], weights.down_scale[index]) @ inner.float()
            expected += share[token, taken] * row
        wrong += float((y[token].float() - expected).square().sum())
        whole += float(expected.square().sum())
    return (wrong / whole) ** 0.5


def measure(tokens: int, weights: Weights, rows: tuple[Tensor, Tensor], hidden: int) -> dict[str, float]:
    experts = len(weights.down)
    x = torch.randn(tokens, hidden, device=DEVICE, dtype=torch.bfloat16)
    chosen = [torch.rand(tokens, experts, device=DEVICE).topk(TOP_K).indices for _ in range(ROUTINGS)]
    share = torch.rand(tokens, TOP_K, device=DEVICE).softmax(-1)
    layers: dict[str, Callable[[int], Tensor]] = {
        "ours": partial(our_layer, x, weights, rows, chosen, share),
        "vllm": partial(vllm_layer, x, weights, chosen, share),
    }
    figures: dict[str, float] = {"tokens": tokens}
    for name, layer in layers.items():
        figures[f"{name}_error"] = error = error_of(layer(0), x, weights, chosen[0], share)
        if not error <= MAX_ERROR:
            print(f"WRONG: {name}, {tokens} tokens: relative error {error:.2e}", flush=True)
    calls: dict[str, Callable[[int], object]] = dict(layers)
    if importlib.util.find_spec("deep_gemm") is not None:
        calls["deepgemm_products"] = deepgemm_products(weights, chosen)
        routings = [route(expert, experts) for expert in chosen]
        inputs = round_rows(x, in_groups=True)
        second = torch.randn(tokens * TOP_K, weights.down.shape[2], device=DEVICE, dtype=x.dtype)
        inner = round_rows(second, in_groups=True)

        def products(i: int) -> None:
            fp8.grouped_matmul(*inputs, weights.gate_up, rows[0], routings[i], x.dtype)
            fp8.grouped_matmul(*inner, weights.down, rows[1], routings[i], x.dtype)

        calls["our_products"] = products

    def report(name: str, error: Exception) -> None:
        print(f"{tokens} tokens: {name} failed: {str(error)[:300]}", flush=True)

    times = interleaved_microseconds(calls, ROUTINGS, DEVICE, TimingBudget(samples=16, seconds=2), report)
    return figures | {f"{name}_us": microseconds for name, microseconds in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="whole")
    parser.add_argument("--tokens", type=lambda text: [int(part) for part in text.split(",")], default=TOKENS)
    parser.add_argument("--vllm", type=Path, help="the folder of vLLM's packages, unless Python finds them")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.vllm is not None:
        sys.path.insert(0, str(arguments.vllm))
    torch.manual_seed(0)
    shape = SHAPES[arguments.shape]
    weights = random_weights(shape)
    rows = weights.rows()
    results: list[dict[str, float]] = []
    for tokens in arguments.tokens:
        results.append(measure(tokens, weights, rows, shape.hidden))
        told = "  ".join(f"{name} {value:.4g}" for name, value in results[-1].items())
        print(f"{arguments.shape}: {told}", flush=True)
        if arguments.out is not None:
            told_of = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
            write_json(arguments.out, told_of | {"shape": arguments.shape, "results": results})


if __name__ == "__main__":
    main()
