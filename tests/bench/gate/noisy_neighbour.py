"""Whole verdicts on a sound artifact beside another process that comes and goes: none may fail.

    python -P tests/bench/gate/noisy_neighbour.py [--only one-core all-cores bursts] [--runs 1]

The bundled checkpoint in INT4, by `make example`'s recipe for CPUs with AVX-512, is validated by `pipeline
validate` while processes outside of that command compute: on one core and on all cores for 20 of every 40
seconds, and on all cores in bursts of 1 to 5 seconds. The table has the verdict's status, what did not pass,
and the share of the CPU that the verdict says other processes and a hypervisor took, beside the share that
the neighbour did take. Exit status 1 if a verdict failed or did not name its neighbour.
"""

import argparse
import json
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scalegate.base.atomic_files import write_json
from scalegate.pipeline.commands.layout import layout
from scalegate.pipeline.commands.quantize import quantize
from scalegate.pipeline.machine.cores import available_cores
from scalegate.serving_check.adapters.cpu_time import cpu_seconds
from scalegate.serving_check.evidence.environment import describe_environment

EXAMPLES = Path(__file__).parents[3] / "examples"
CHECKPOINT, RECIPE = EXAMPLES / "qwen3-pycode-5m", EXAMPLES / "int4-example.yaml"
RESULT = Path(__file__).parents[1] / "results" / "gate" / "noisy_neighbour.json"
NUMBERS = 1 << 20
"""Of float64: more than a core's own caches hold."""


@dataclass(frozen=True)
class Neighbour:
    """Computes and rests in turn. Both times in seconds are drawn evenly from a range."""

    processes: int
    shortest: float
    longest: float


NEIGHBOURS = {
    "one-core": Neighbour(1, 20.0, 20.0),
    "all-cores": Neighbour(available_cores(), 20.0, 20.0),
    "bursts": Neighbour(available_cores(), 1.0, 5.0),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=NEIGHBOURS, default=list(NEIGHBOURS))
    parser.add_argument("--runs", type=int, default=1, help="for each neighbour")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    environment = vars(describe_environment("cpu", "auto", "embedded", "embedded"))
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as work:
        artifact = Path(work) / "int4"
        quantize(CHECKPOINT, RECIPE, out=artifact, progress=False)
        layout(artifact, progress=False)
        for name in options.only * options.runs:
            rows.append({"neighbour": name, **run_once(artifact, NEIGHBOURS[name], len(rows))})
            print(sentence(rows[-1]), flush=True)
            write_json(options.out, {"environment": environment, "runs": rows})
    sys.exit(any(row["status"] == "fail" or not row["is_named"] for row in rows))


def run_once(artifact: Path, neighbour: Neighbour, seed: int) -> dict[str, Any]:
    command = [sys.executable, "-P", "-m", "scalegate.pipeline", "validate", str(artifact)]
    command += ["--device", "cpu", "--json"]
    started = time.monotonic()
    with beside(neighbour, seed) as processes:
        done = subprocess.run(command, capture_output=True, text=True)
        seconds = time.monotonic() - started
        taken = cpu_seconds(processes) / seconds / available_cores()
    if not done.stdout:
        raise SystemExit(f"pipeline validate: {done.stderr[-2000:]}")
    verdict = json.loads(done.stdout)
    checks = {check["name"]: check for check in verdict["checks"]}
    undisturbed = checks["undisturbed"]
    return {
        "status": verdict["status"],
        "not_passed": {
            name: f"{check['status']}: {check['reason']}"
            for name, check in checks.items()
            if check["status"] != "pass"
        },
        "seconds": round(seconds, 1),
        "blocks": {point["m"]: len(point["log_ratios"]) for point in verdict["curve"]},
        "ratios": {point["m"]: point["ratio"] for point in verdict["curve"]},
        "taken": round(taken, 3),
        "is_named": "other processes took" in undisturbed["measured"],
        "others_cpu": undisturbed["figures"]["others_cpu"],
        "stolen_cpu": undisturbed["figures"]["stolen_cpu"],
        "said": undisturbed["measured"],
    }


@contextmanager
def beside(neighbour: Neighbour, seed: int) -> Iterator[list[int]]:
    """Run the neighbour's processes, whose ids are given, inside the `with` block."""
    context = multiprocessing.get_context("spawn")
    every = [
        context.Process(target=compute_and_rest, args=(neighbour, seed), daemon=True)
        for _ in range(neighbour.processes)
    ]
    for process in every:
        process.start()
    try:
        yield [process.pid for process in every if process.pid is not None]
    finally:
        for process in every:
            process.kill()
            process.join()


def compute_and_rest(neighbour: Neighbour, seed: int) -> None:
    """With one seed, all processes compute at the same times."""
    times, numbers = random.Random(seed), np.ones(NUMBERS)
    parent = os.getppid()
    while os.getppid() == parent:
        until = time.monotonic() + times.uniform(neighbour.shortest, neighbour.longest)
        while time.monotonic() < until:
            numbers *= 1.0
        time.sleep(times.uniform(neighbour.shortest, neighbour.longest))


def sentence(row: dict[str, Any]) -> str:
    others = "; ".join(f"{name}: {why}" for name, why in row["not_passed"].items())
    return (
        f"{row['neighbour']:10} {row['status']:12} {row['seconds']:6.1f} s  took {row['taken']:.1%}; the "
        f"verdict: {row['said']}  {others}"
    )


if __name__ == "__main__":
    main()
