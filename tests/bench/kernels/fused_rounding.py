"""Times RMSNorm and SiLU times up with their rounding to E4M3, beside Inductor's kernels, rounded apart.

    python -P tests/bench/kernels/fused_rounding.py

Rows of Qwen3-8B: the norm of 4,096 columns after an addition, SiLU times up of 12,288. Each is timed with
several numbers of warps; `*` marks what the table takes. First the codes of 2^26 numbers, many of them about
the middle of two codes, are compared with the definition's. Not for engines (`fp8_engine.py`).
"""

import argparse
from collections.abc import Callable
from functools import partial

import torch
from scalegate.kernels.fp8 import fused_rounding
from scalegate.kernels.fp8.fused_rounding import (
    norm_and_round,
    norm_reference,
    silu_and_round,
    silu_reference,
)
from scalegate.kernels.fp8.round_rows import round_rows
from scalegate.layouts.choosing.timing import TimingBudget, interleaved_microseconds
from scalegate.layouts.formats.e4m3 import PER_TOKEN
from torch import Tensor

HIDDEN, INNER, EPS = 4096, 12288, 1e-6
WARPS = (4, 8, 16, 32)
DEVICE = torch.device("cuda")


def check() -> None:
    """The codes of rows of all magnitudes are the definition's."""
    middle = torch.arange(126, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middle = (middle[1:] + middle[:-1]) / 2
    wrong = 0
    for exponent in range(-126, 120, 6):
        x = torch.randn(400, HIDDEN, device=DEVICE)
        x[200:, 1:] = middle.to(DEVICE)[torch.randint(0, 125, (200, HIDDEN - 1), device=DEVICE)]
        x[200:, 0] = 448 * (1 + torch.rand(200, device=DEVICE))
        x[300:] *= torch.rand(100, 1, device=DEVICE) + 0.5
        x = (x * 2.0**exponent).to(torch.bfloat16)
        codes, scales = round_rows(x)
        wanted, wanted_scales = PER_TOKEN.codes(x)
        wrong += int((codes.view(torch.uint8) != wanted.view(torch.uint8)).sum())
        wrong += int((scales.t() != wanted_scales).sum())
    print(f"codes that are not the definition's: {wrong}", flush=True)
    x, residual, weight = (torch.randn(n, HIDDEN, device=DEVICE).bfloat16() for n in (300, 300, 1))
    h, y, codes, scales = norm_and_round(x, residual, weight[0], EPS, keeps=True)
    same, same_scales = round_rows(y)
    _, want = norm_reference(x, residual, weight[0], EPS)
    print(
        f"norm: codes equal {torch.equal(codes.view(torch.uint8), same.view(torch.uint8))}, scales "
        f"{torch.equal(scales, same_scales)}, h {torch.equal(h, x + residual)}, y equal "
        f"{(y == want).float().mean():.5f}, largest difference {(y.float() - want).abs().max():.4f}"
    )
    gate_up = torch.randn(300, 2 * INNER, device=DEVICE).mul(3).bfloat16()
    codes, scales = silu_and_round(gate_up)
    for name, want in (("reference", silu_reference(gate_up)), ("Inductor", inductor_silu()(gate_up))):
        wanted, _ = round_rows(want)
        equal = (codes.view(torch.uint8) == wanted.view(torch.uint8)).float().mean()
        print(f"SiLU: codes equal to {name}'s {equal:.6f}", flush=True)


def inductor_norm() -> Callable[..., tuple[Tensor, Tensor]]:
    return torch.compile(norm_reference, dynamic=True, fullgraph=True)


def inductor_silu() -> Callable[[Tensor], Tensor]:
    return torch.compile(silu_reference, dynamic=True, fullgraph=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--m", default="1,16,64,128,256,1024,4096,8192", help="comma-separated")
    rows = [int(m) for m in parser.parse_args().m.split(",")]
    torch.manual_seed(0)
    check()
    weight = torch.randn(HIDDEN, device=DEVICE).bfloat16()
    norm, silu = inductor_norm(), inductor_silu()
    for m in rows:
        x, residual = (torch.randn(m, HIDDEN, device=DEVICE).bfloat16() for _ in range(2))
        gate_up = torch.randn(m, 2 * INNER, device=DEVICE).bfloat16()
        calls: dict[str, Callable[[int], object]] = {
            "round 4096": lambda i, x=x: round_rows(x),
            "norm apart": lambda i, x=x, r=residual: round_rows(norm(x, r, weight, EPS)[1]),
            "SiLU apart": lambda i, g=gate_up: round_rows(silu(g)),
        }
        for warps in WARPS:
            star = "*" if warps == fused_rounding.warps_for(m, fused_rounding.PIECE) else ""
            norms = partial(norm_and_round, x, residual, weight, EPS)
            calls[f"norm {warps}{star}"] = lambda i, f=norms, w=warps: f(False, w)
            calls[f"norm kept {warps}{star}"] = lambda i, f=norms, w=warps: f(True, w)
            calls[f"SiLU {warps}{star}"] = lambda i, g=gate_up, w=warps: silu_and_round(g, w)
        times = interleaved_microseconds(calls, 1, DEVICE, TimingBudget(samples=16, seconds=2))
        told = "  ".join(f"{name} {us:.1f}" for name, us in sorted(times.items()))
        print(f"M={m}: {told}", flush=True)


if __name__ == "__main__":
    main()
