"""How long a verdict takes in two trees of Scalegate side by side: before a change and after it, in one call.

    python -P tests/bench/gate/verdict_time.py --before OTHER_TREE \\
        examples/qwen3-pycode-5m=examples/int4-example.yaml /some/checkpoint=int4-hqq

Each CHECKPOINT=RECIPE is quantized by either tree and measured by it, then both trees take turns at
`pipeline validate` with its defaults. The figure is the wall time of that command, Python's start included.
Exit status 1 where after takes more than `--most` of before, medians over the runs.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from scalegate.base.atomic_files import write_json
from scalegate.serving_check.evidence.environment import describe_environment

ROOT = Path(__file__).resolve().parents[3]
RESULT = Path(__file__).parents[1] / "results" / "gate" / "verdict_time.json"
TREES = ("before", "after")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("jobs", nargs="+", metavar="CHECKPOINT=RECIPE")
    parser.add_argument("--before", type=Path, required=True, help="the tree to compare with")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--most", type=float, default=0.7)
    parser.add_argument("--work", type=Path, help="where artifacts are kept from call to call")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    work = options.work or Path(tempfile.mkdtemp(prefix="verdict-time-"))
    trees = {"before": options.before.resolve(), "after": ROOT}
    rows = []
    for job in options.jobs:
        checkpoint, _, recipe = job.partition("=")
        artifacts = {tree: work / f"{Path(checkpoint).name}-{tree}" for tree in TREES}
        for tree, artifact in artifacts.items():
            if not (artifact / "scalegate.json").exists():
                pipeline(trees[tree], work, "quantize", checkpoint, "--recipe", recipe, "--out", artifact)
                pipeline(trees[tree], work, "layout", artifact)
        runs: dict[str, list[dict[str, Any]]] = {tree: [] for tree in TREES}
        for index in range(options.runs):
            for tree in TREES if index % 2 == 0 else TREES[::-1]:
                runs[tree].append(one_verdict(trees[tree], work, artifacts[tree]))
                print(f"{Path(checkpoint).name} {tree}: {json.dumps(runs[tree][-1])}", flush=True)
        seconds = {tree: median(run["seconds"] for run in found) for tree, found in runs.items()}
        rows.append(
            {"checkpoint": Path(checkpoint).name, **seconds, "share": seconds["after"] / seconds["before"]}
            | {"runs": runs}
        )
    environment = vars(describe_environment("cpu", "auto", "embedded", "embedded"))
    write_json(options.out, {"environment": environment, "rows": rows})
    for row in rows:
        print(f"{row['checkpoint']:20} {row['before']:6.1f} s {row['after']:6.1f} s  {row['share']:.2f}")
    sys.exit(any(row["share"] > options.most for row in rows))


def one_verdict(tree: Path, work: Path, artifact: Path) -> dict[str, Any]:
    started = time.monotonic()
    verdict = json.loads(pipeline(tree, work, "validate", artifact, "--json", statuses=(0, 1, 2)))
    return {
        "seconds": round(time.monotonic() - started, 1),
        "verdict": verdict["status"],
        "blocks": {point["m"]: len(point["log_ratios"]) for point in verdict["curve"]},
        "ratios": {point["m"]: round(point["ratio"] or 0.0, 3) for point in verdict["curve"]},
        "parts": verdict.get("seconds_by_part"),
    }


def pipeline(tree: Path, work: Path, *words: object, statuses: tuple[int, ...] = (0,)) -> str:
    """What a command of `tree`, imported as `scalegate` by way of a link, printed on standard output."""
    root = work / f"root-{tree.name}"
    root.mkdir(parents=True, exist_ok=True)
    if not (root / "scalegate").exists():
        (root / "scalegate").symlink_to(tree)
    command = [sys.executable, "-P", "-m", "scalegate.pipeline", *map(str, words)]
    others = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), *filter(None, others)])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode not in statuses:
        raise SystemExit(f"{words[0]} of {tree} failed: {done.stderr[-2000:]}")
    return done.stdout


if __name__ == "__main__":
    main()
