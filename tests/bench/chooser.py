"""Whether the chooser is quick, right and steady: RUNS choices made afresh on a model's linear shapes.

    python -P tests/bench/chooser.py --runs 10 --out tests/bench/results/chooser.json

A pick is as good as the median of its mean ratios over all runs, beside the best that any layout has. Times
include what other people's kernels compile and tune in the first run. Not for the layouts' own figures.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
from scalegate.layouts.choose import choose
from scalegate.layouts.explain import lowest_ratio, mean_ratio
from scalegate.layouts.files import write_json
from scalegate.layouts.int4 import Int4Weight
from scalegate.layouts.layout import Problem
from scalegate.layouts.measurement_cache import CACHE_VARIABLE
from scalegate.layouts.plan import LayoutPlan, device_name, kernel_versions

MODELS = {
    "qwen3-8b": {"q_o": (4096, 4096), "k_v": (1024, 4096), "gate_up": (12288, 4096), "down": (4096, 12288)},
    "qwen3-pycode-5m": {"q_o": (256, 256), "k_v": (128, 256), "gate_up": (768, 256), "down": (256, 768)},
}


def median_ratios(plans: list[LayoutPlan], index: int) -> dict[str, tuple[float, float]]:
    """For each layout measured in every run on one shape: mean and lowest ratio, medians of the runs."""
    choices = [plan.choices[index] for plan in plans]
    names = set(choices[0].measured_layouts).intersection(*(one.measured_layouts for one in choices))
    return {
        name: (
            statistics.median(mean_ratio(one, name) for one in choices),
            statistics.median(lowest_ratio(one, name) for one in choices),
        )
        for name in sorted(names)
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default="qwen3-8b")
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = torch.device(options.device)
    problems = {
        name: Problem(Int4Weight, options.group_size, True, n, k, torch.bfloat16, device)
        for name, (n, k) in MODELS[options.model].items()
    }
    plans, seconds = [], []
    with tempfile.TemporaryDirectory() as cache:
        os.environ[CACHE_VARIABLE] = cache
        for run in range(options.runs):
            started = time.perf_counter()
            plans.append(choose(problems, fresh=True, progress=False))
            seconds.append(time.perf_counter() - started)
            picks = {choice.modules[0]: choice.layout for choice in plans[-1].choices}
            print(f"run {run}: {seconds[-1]:.1f} s, {picks}", flush=True)
    rows = []
    for index, choice in enumerate(plans[0].choices):
        ratios = median_ratios(plans, index)
        picks = Counter(plan.choices[index].layout for plan in plans)
        picked = picks.most_common(1)[0][0]
        best = max(mean for mean, _ in ratios.values())
        row = {"shape": choice.shape, "picks": dict(picks), "ratios": ratios, "refusals": choice.refusals}
        rows.append(row | {"share_of_best_mean": round(ratios[picked][0] / best, 4)})
        print(
            f"{choice.shape}: {dict(picks)}, {ratios[picked][0] / best:.3f} of the best layout's mean ratio"
        )
        for name, (mean, lowest) in ratios.items():
            print(f"    {name:20} mean {mean:.2f}, lowest {lowest:.2f}")
    print(f"first {seconds[0]:.1f} s, later {statistics.median(seconds[1:] or seconds):.1f} s a choice")
    if options.out:
        record = {"device": device_name(device), "versions": kernel_versions(), "model": options.model}
        write_json(options.out, record | {"seconds": [round(s, 1) for s in seconds], "shapes": rows})


if __name__ == "__main__":
    main()
