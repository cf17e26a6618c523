"""What a launch of a packed product costs beside its bytes, on a Hopper GPU.

    python -P tests/bench/kernels/fixed_cost.py --format nvfp4 --layout nvfp4_swap_ab --m 4,8,16
    ncu --profile-from-start off python -P tests/bench/kernels/fixed_cost.py --profile

Times weights of many sizes with K = 4096, and the best line through the times: microseconds of a launch, and
bytes a second beyond them. Weights are rotated past the L2 cache and calls run in a CUDA graph, in which each
begins while the one ahead ends. Beside them: an empty kernel, begun so and begun afterwards, and a weight of
one step for each CTA. With `--profile`, the linear layers of Qwen3-8B run once each, for ncu.
"""

import argparse
from collections.abc import Callable
from functools import partial

import torch
from scalegate.layouts.choosing.timing import TimingBudget, interleaved_microseconds
from scalegate.layouts.formats.int4 import Int4
from scalegate.layouts.formats.nvfp4 import NVFP4
from scalegate.layouts.packing.all_layouts import LAYOUTS
from scalegate.tests.bench.kernels.iq2_xxs import copied_bytes_a_second, copies_of, layout_call
from scalegate.tests.bench.kernels.linear import MODELS
from torch import Tensor
from triton import jit
from triton import language as tl

FORMATS = {"nvfp4": NVFP4(), "int4": Int4(128, symmetric=True)}
K = 4096
ROWS = (4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152)
SMALL = 132 * 128, 128
"""A weight of one step for each CTA."""
BUDGET = TimingBudget(samples=16, seconds=0.5)


@jit
def empty_kernel(OVERLAPS: tl.constexpr):
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


def launch_empty(overlaps: bool, out: Tensor, i: int) -> Tensor:
    empty_kernel[(132,)](overlaps, num_warps=4, launch_pdl=overlaps)
    return out


def call_of(form: str, layout: str, n: int, k: int, x: Tensor) -> tuple[Callable[[int], Tensor], int, int]:
    """The product with a weight [n, k] that is another one each time, its bytes, and how many there are."""
    weight = FORMATS[form].random(n, k, torch.device("cuda"))
    copies = copies_of(LAYOUTS[layout].pack(weight, torch.bfloat16))
    return layout_call(copies, x), copies[0].nbytes, len(copies)


def line_through(points: list[tuple[float, float]]) -> tuple[float, float]:
    """The intercept and the slope by least squares."""
    xs, ys = torch.tensor(points, dtype=torch.float64).T
    slope = ((xs - xs.mean()) * (ys - ys.mean())).sum() / ((xs - xs.mean()) ** 2).sum()
    return float(ys.mean() - slope * xs.mean()), float(slope)


def measure(form: str, layout: str, m: int, copy_rate: float) -> None:
    points = []
    for n in ROWS:
        x = torch.randn(m, K, device="cuda", dtype=torch.bfloat16)
        call, size, count = call_of(form, layout, n, K, x)
        us = interleaved_microseconds({"it": call}, max(40, count), x.device, BUDGET)["it"]
        points.append((size, us))
        share = size / copy_rate / us * 1e6
        print(
            f"{layout} M={m} {n}x{K}: {size / 1e6:.1f} MB {us:.1f} us, {share:.0%} of a copy's rate",
            flush=True,
        )
    intercept, slope = line_through(points)
    print(f"{layout} M={m}: {intercept:.2f} us a launch, then {1e-6 / slope:.2f} TB/s", flush=True)


def measure_one_step(form: str, layout: str, m: int) -> None:
    x = torch.randn(m, SMALL[1], device="cuda", dtype=torch.bfloat16)
    call, size, count = call_of(form, layout, *SMALL, x)
    us = interleaved_microseconds({"it": call}, count, x.device, BUDGET)["it"]
    print(f"{layout} M={m} {SMALL[0]}x{SMALL[1]}: {size / 1e6:.1f} MB {us:.2f} us", flush=True)


def profile(form: str, layout: str, m: int) -> None:
    for n, k in MODELS["qwen3-8b"].values():
        x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        call, _, _ = call_of(form, layout, n, k, x)
        for i in range(4):
            call(i)
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        call(4)
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--format", choices=FORMATS, default="nvfp4")
    parser.add_argument("--layout", default="nvfp4_swap_ab")
    parser.add_argument("--m", default="8", help="comma-separated")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    ms = [int(m) for m in options.m.split(",")]
    if options.profile:
        profile(options.format, options.layout, ms[0])
        return
    copy_rate = copied_bytes_a_second()
    print(f"{torch.cuda.get_device_name()}: a large copy moves {copy_rate / 1e12:.2f} TB/s", flush=True)
    out = torch.empty(1, device="cuda")
    empty = {
        "an empty kernel, begun while the one ahead ends": partial(launch_empty, True, out),
        "an empty kernel, begun afterwards": partial(launch_empty, False, out),
    }
    for name, us in interleaved_microseconds(empty, 200, out.device, BUDGET).items():
        print(f"{name}: {us:.2f} us", flush=True)
    for m in ms:
        measure(options.format, options.layout, m, copy_rate)
    for m in ms:
        measure_one_step(options.format, options.layout, m)


if __name__ == "__main__":
    main()
