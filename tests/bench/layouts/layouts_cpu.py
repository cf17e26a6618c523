"""Which layout is quickest at each M on this CPU, on the layer shapes of real checkpoints.

    python -P tests/bench/layouts/layouts_cpu.py examples/qwen3-pycode-5m [MORE ...] [--runs 10]

Every layout is timed beside the unquantized linear, interleaved, in bfloat16 and float32, groups of 64. For
the first checkpoint in bfloat16 the choice is then made RUNS times afresh, to see whether the pick wavers.
Writes results/layouts_cpu.json. Not for CUDA: linear.py is.
"""

import argparse
import os
import time
from collections import Counter
from pathlib import Path

import torch
from scalegate.base.atomic_files import write_json
from scalegate.base.installed import kernel_versions
from scalegate.layouts.choosing.choose import DEFAULT_MS, pick
from scalegate.layouts.choosing.explain import lowest_ratio, mean_ratio
from scalegate.layouts.choosing.measure import measure
from scalegate.layouts.choosing.plan import ShapeChoice, device_name
from scalegate.layouts.choosing.timing import TimingBudget, interleaved_microseconds
from scalegate.layouts.formats.int4 import Int4
from scalegate.layouts.modules.linear import QuantizedLinear
from scalegate.layouts.packing.all_layouts import LAYOUTS
from scalegate.layouts.packing.layout import Problem
from scalegate.pipeline.checkpoints.checkpoint import open_checkpoint

CPU = torch.device("cpu")
RESULTS = Path(__file__).parents[1] / "results" / "layouts" / "layouts_cpu.json"
DTYPES = (torch.bfloat16, torch.float32)
GROUP_SIZE = 64


def linear_shapes(folder: str) -> list[tuple[int, int]]:
    """The distinct [N, K] of a decoder's linear layers, the embedding left out."""
    tensors = open_checkpoint(folder).tensors
    names = [name for name in tensors if name.endswith("_proj.weight")]
    return sorted({tuple(tensors[name].shape) for name in names})


def overhead() -> dict[str, float]:
    """Microseconds a call at M=1 on a 256×256 layer: the kernel, the module around it, and `nn.Linear`."""
    packed = LAYOUTS["cpu_int4"].pack(Int4(GROUP_SIZE).random(256, 256, CPU), torch.bfloat16)
    module = QuantizedLinear(packed, None)
    linear = torch.nn.Linear(256, 256, bias=False, dtype=torch.bfloat16)
    x = torch.randn(1, 1, 256, dtype=torch.bfloat16)
    rows = x.view(1, 256)
    tensors, group_size = packed.tensors, packed.attributes["group_size"]
    kernel = torch._weight_int4pack_mm_for_cpu
    calls = {
        "nn.Linear": lambda copy: linear(x),
        "QuantizedLinear": lambda copy: module(x),
        "layout.matmul": lambda copy: module.layout.matmul(rows, packed),
        "kernel": lambda copy: kernel(rows, tensors["codes"], group_size, tensors["scale_and_zero"]),
    }
    with torch.inference_mode():
        return interleaved_microseconds(calls, 1, CPU, TimingBudget(samples=64))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoints", nargs="+", help="folders of unquantized checkpoints")
    parser.add_argument("--runs", type=int, default=10, help="choices made afresh for each shape")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    shapes = sorted({shape for folder in options.checkpoints for shape in linear_shapes(folder)})
    rows = []
    repeated = linear_shapes(options.checkpoints[0])
    for dtype in DTYPES:
        for n, k in shapes:
            runs = options.runs if dtype is torch.bfloat16 and (n, k) in repeated else 1
            rows.append(one_shape(Problem(Int4(GROUP_SIZE), n, k, dtype, CPU), runs))
            show(rows[-1])
    calls = {name: round(value, 1) for name, value in overhead().items()}
    print("one call at M=1, 256x256, in microseconds:", calls)
    result = {
        "device": device_name(CPU),
        "versions": kernel_versions(),
        "ms": list(DEFAULT_MS),
        "microseconds_a_call_at_m_1_256x256": calls,
        "load_average_when_done": round(os.getloadavg()[0], 1),
        "shapes": rows,
    }
    write_json(RESULTS, result)


def one_shape(problem: Problem, runs: int) -> dict[str, object]:
    """The first run's table, and how often each layout was picked."""
    picks: Counter[str] = Counter()
    table: dict[str, object] = {}
    started = time.perf_counter()
    for run in range(runs):
        choice = pick(str(problem), (), measure(problem, DEFAULT_MS, list(LAYOUTS)))
        picks[choice.layout] += 1
        if run == 0:
            table = {layout: curve(choice, layout) for layout in choice.measured_layouts}
    return {
        "shape": str(problem),
        "picks": dict(picks),
        "seconds_a_choice": round((time.perf_counter() - started) / runs, 2),
        "layouts": table,
    }


def curve(choice: ShapeChoice, layout: str) -> dict[str, object]:
    return {
        "mean_ratio": round(mean_ratio(choice, layout), 3),
        "lowest_ratio": round(lowest_ratio(choice, layout), 3),
        "by_m": {
            str(m): {
                "microseconds": round(measurement.microseconds, 1),
                "unquantized": round(measurement.baseline_microseconds, 1),
                "ratio": round(measurement.ratio, 3),
            }
            for m, measurement in choice.curve(layout).items()
        },
    }


def show(row: dict) -> None:
    print(f"{row['shape']}: picked {row['picks']}, {row['seconds_a_choice']} s a choice")
    for layout, figures in row["layouts"].items():
        ratios = "  ".join(f"{m}: {measurement['ratio']:.2f}" for m, measurement in figures["by_m"].items())
        print(f"  {layout:18} mean {figures['mean_ratio']:.2f}  {ratios}", flush=True)


if __name__ == "__main__":
    main()
