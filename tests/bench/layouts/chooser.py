"""Whether the chooser is quick, right and steady: RUNS choices made afresh on a model's linear shapes.

    python -P tests/bench/layouts/chooser.py --runs 10 --out OUT/chooser.json

A pick is as good as its ratios to the unquantized product, medians of all runs: beside the best layout's, and
beside those of whichever layout is best at each M. The first run is as a user's: it includes what kernels
compile and tune. Each later one measures all anew, but a layout that was not ready in time gets only
`--later-seconds` more. Refusals are those of the first and of the last run. Not for the layouts' own figures.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
from scalegate.base.atomic_files import write_json
from scalegate.base.installed import kernel_versions
from scalegate.layouts.choosing import choose as choose_module
from scalegate.layouts.choosing.choose import choose
from scalegate.layouts.choosing.measurement_cache import CACHE_VARIABLE
from scalegate.layouts.choosing.plan import LayoutPlan, device_name
from scalegate.layouts.formats.int4 import Int4
from scalegate.layouts.packing.layout import Problem

MODELS = {
    "qwen3-8b": {"q_o": (4096, 4096), "k_v": (1024, 4096), "gate_up": (12288, 4096), "down": (4096, 12288)},
    "qwen3-pycode-5m": {"q_o": (256, 256), "k_v": (128, 256), "gate_up": (768, 256), "down": (256, 768)},
}


def median_curves(plans: list[LayoutPlan], index: int) -> dict[str, dict[int, float]]:
    """For each layout measured in every run on one shape: its ratios by M, medians of the runs."""
    choices = [plan.choices[index] for plan in plans]
    names = set(choices[0].measured_layouts).intersection(*(choice.measured_layouts for choice in choices))
    return {
        name: {
            m: statistics.median(choice.curve(name)[m].ratio for choice in choices)
            for m in choices[0].curve(name)
        }
        for name in sorted(names)
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default="qwen3-8b")
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--later-seconds", type=float, default=1.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = torch.device(options.device)
    problems = {
        name: Problem(Int4(options.group_size), n, k, torch.bfloat16, device)
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
            choose_module.SHAPE_SECONDS = options.later_seconds
    rows = []
    for index, choice in enumerate(plans[0].choices):
        curves = median_curves(plans, index)
        means = {name: statistics.geometric_mean(curve.values()) for name, curve in curves.items()}
        envelope = {m: max(curve[m] for curve in curves.values()) for m in next(iter(curves.values()))}
        picks = Counter(plan.choices[index].layout for plan in plans)
        mean = means[picks.most_common(1)[0][0]]
        row = {
            "shape": choice.shape,
            "picks": dict(picks),
            "share_of_best_layout": round(mean / max(means.values()), 4),
            "share_of_best_at_every_m": round(mean / statistics.geometric_mean(envelope.values()), 4),
            "ratios": {
                name: {m: round(ratio, 3) for m, ratio in curve.items()} for name, curve in curves.items()
            },
            "refusals": [dict(plan.choices[index].refusals) for plan in (plans[0], plans[-1])],
        }
        rows.append(row)
        print(
            f"{choice.shape}: {row['picks']}, mean ratio {mean:.2f}, {row['share_of_best_layout']:.3f} "
            f"of the best layout's, {row['share_of_best_at_every_m']:.3f} of the best at each M"
        )
        for name, curve in curves.items():
            figures = " ".join(f"{m}:{ratio:.2f}" for m, ratio in curve.items())
            print(f"    {name:20} mean {means[name]:.2f}  {figures}")
        for name, reason in plans[-1].choices[index].refusals.items():
            if "here" in reason:
                print(f"    {name:20} {reason}")
    print(f"first {seconds[0]:.1f} s, later {statistics.median(seconds[1:] or seconds):.1f} s a choice")
    if options.out:
        record = {"device": device_name(device), "versions": kernel_versions(), "model": options.model}
        write_json(options.out, record | {"seconds": [round(s, 1) for s in seconds], "shapes": rows})


if __name__ == "__main__":
    main()
