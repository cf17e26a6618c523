"""What sound artifacts show of each bounded quality figure, over many texts: how much room the bounds leave.

    python -P tests/bench/gate/quality_bounds.py CHECKPOINT... --heldout heldout.jsonl --out bounds.json

INT4 artifacts of every group size, each compared with its source on `--seeds` draws of windows from the text,
as many tokens as `validate` takes, in float32. The result has the worst of each figure beside its bound. A
run that was broken off goes on where it stopped.
"""

import argparse
import json
import random
import tempfile
from dataclasses import asdict
from pathlib import Path

import torch
from scalegate.base.atomic_files import write_json
from scalegate.layouts.formats.int4 import Int4
from scalegate.pipeline.checkpoints.checkpoint import open_checkpoint
from scalegate.pipeline.commands.quantize import quantize
from scalegate.pipeline.model_loader.load_model import load_model, load_tokenizer
from scalegate.pipeline.records.recipe import Recipe
from scalegate.pipeline.validation.held_out import WINDOW
from scalegate.serving_check.checks.quality import check_quality
from scalegate.serving_check.quality import compare, read_texts, token_windows
from scalegate.serving_check.settings import QUALITY_TOKENS, Bounds

GROUPS = (32, 64, 128)
BOUNDED = {
    "mean_kl": "max_mean_kl",
    "p999_kl": "max_p999_kl",
    "max_kl": "max_max_kl",
    "extra_nats_per_token": "max_extra_nats",
    "top1_agreement": "min_top1_agreement",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoints", nargs="+", type=Path)
    parser.add_argument("--heldout", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    runs = json.loads(arguments.out.read_text())["runs"] if arguments.out.is_file() else []
    for checkpoint in arguments.checkpoints:
        for group_size in GROUPS:
            measure(checkpoint, group_size, arguments, runs)
    print(json.dumps(worst(runs), indent=2))


def measure(checkpoint: Path, group_size: int, arguments: argparse.Namespace, runs: list[dict]) -> None:
    """Add the runs of one artifact that are not there yet, each written down at once."""
    name = f"{checkpoint.name} g{group_size}"
    seeds = set(range(arguments.seeds)) - {run["seed"] for run in runs if run["artifact"] == name}
    if not seeds:
        return
    tokenizer = load_tokenizer(open_checkpoint(checkpoint))
    windows = token_windows(tokenizer, read_texts(arguments.heldout), WINDOW)
    with tempfile.TemporaryDirectory() as folder:
        quantize(checkpoint, Recipe(name, spec=Int4(group_size)), folder, device="cpu", progress=False)
        sides = [
            load_model(path, device="cpu", dtype=torch.float32, progress=False).model
            for path in (folder, checkpoint)
        ]
    for seed in sorted(seeds):
        drawn = random.Random(seed).sample(windows, QUALITY_TOKENS // WINDOW)
        comparison = compare(*sides, drawn)
        result = check_quality(comparison, Bounds())
        figures = asdict(comparison) | {"extra_nats_per_token": comparison.extra_nats_per_token}
        runs.append({"artifact": name, "seed": seed, "status": result.status} | figures)
        print(name, seed, result.status, result.measured, flush=True)
        write_json(arguments.out, {"torch": torch.__version__, "worst": worst(runs), "runs": runs})


def worst(runs: list[dict]) -> dict[str, dict[str, float]]:
    """By figure: the worst of every run, and the bound."""
    return {
        figure: {
            "worst": (min if bound.startswith("min") else max)(run[figure] for run in runs),
            "bound": getattr(Bounds(), bound),
        }
        for figure, bound in BOUNDED.items()
    }


if __name__ == "__main__":
    main()
