"""The gate's own error rates: a checkpoint against itself, and against a copy slowed on purpose.

    python -P tests/bench/gate/gate.py examples/qwen3-pycode-5m --runs 20

A large machine does several such at once, each on two cores of its own (lane 3 of 8, then all together):

    taskset -c 6,7 python -P tests/bench/gate/gate.py … --runs 4 --first-run 12 --out lane3.json
    python -P tests/bench/gate/gate.py … --runs 0 --merge lane0.json … lane7.json

Every run is a whole `validate` over HTTP. Bar: the first never fails, the second never passes; inconclusive
is allowed and counted. The slowed copy is the same checkpoint behind `tests/serving_check/slowed_server.py`,
whose steps take 1/0.85 of their time from M=8 on, so its throughput is 15% lower there. A third, `hopeless`,
takes ten times as long at every M (`--cases hopeless`): it fails within 40 s of both servers being up.
"""

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from scalegate.base.atomic_files import write_json
from scalegate.pipeline.commands.validate import validate
from scalegate.pipeline.validation.servers import server_of, sized_options
from scalegate.serving_check.adapters import SubprocessEndpoint
from scalegate.serving_check.adapters.all_engines import DEFAULT_ENGINE
from scalegate.serving_check.adapters.engine import ServerJob
from scalegate.serving_check.evidence.environment import describe_environment
from scalegate.serving_check.evidence.verdict import Verdict
from scalegate.serving_check.settings import WorkloadSettings

SLOWED_SERVER = Path(__file__).parents[2] / "serving_check" / "slowed_server.py"
RESULT = Path(__file__).parents[1] / "results" / "gate" / "gate.json"
SLOWED = {"slowed": (1 / 0.85, 8), "hopeless": (10.0, 1)}
"""By how much a step takes longer, and from which M on."""
CASES = ("itself", *SLOWED)
MOST_SECONDS_HOPELESS = 40


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--first-run", type=int, default=0, help="Seed of the first run, to continue with.")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=["itself", "slowed"])
    parser.add_argument("--merge", type=Path, nargs="*", default=[], help="Results to begin with.")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    merged = [json.loads(path.read_text()) for path in options.merge]
    environment = (
        merged[0]["environment"]
        if merged
        else vars(describe_environment("cpu", "auto", DEFAULT_ENGINE, DEFAULT_ENGINE))
    )
    runs: list[dict[str, Any]] = [run for result in merged for run in result["runs"]]
    for seed in range(options.first_run, options.first_run + options.runs):
        for case in options.cases:
            started = time.monotonic()
            verdict = run_once(options.checkpoint, case, seed)
            runs.append(summary(case, seed, time.monotonic() - started, verdict))
            print(json.dumps(runs[-1]), flush=True)
            write_result(options.out, environment, runs)
    write_result(options.out, environment, runs)
    for case, counts in rates(runs).items():
        print(f"{case:8} {counts}")
    sys.exit(any(is_wrong(run) for run in runs))


def is_wrong(run: dict[str, Any]) -> bool:
    if run["case"] == "hopeless":
        return run["verdict"] != "fail" or run["seconds_after_both_were_up"] > MOST_SECONDS_HOPELESS
    return run["verdict"] == {"itself": "fail", "slowed": "pass"}[run["case"]]


def write_result(path: Path, environment: dict[str, Any], runs: list[dict[str, Any]]) -> None:
    write_json(path, {"environment": environment, "runs": runs, "rates": rates(runs)})


def run_once(checkpoint: Path, case: str, seed: int) -> Verdict:
    if case == "itself":
        return validate(checkpoint, checkpoint, device="cpu", seed=seed, progress=False)
    with tempfile.TemporaryDirectory() as logs, slowed(checkpoint, Path(logs), *SLOWED[case]) as endpoint:
        return validate(
            checkpoint,
            checkpoint,
            engine=endpoint.base_url,
            baseline_engine=DEFAULT_ENGINE,
            device="cpu",
            seed=seed,
            progress=False,
        )


def slowed(checkpoint: Path, logs: Path, factor: float, from_m: int) -> SubprocessEndpoint:
    """The endpoint that `validate` itself would start, behind the slowing launcher."""
    options = sized_options({"device": "cpu"}, WorkloadSettings())
    embedded = server_of(
        ServerJob(DEFAULT_ENGINE, "artifact", checkpoint, options, logs / "artifact.log", progress=False)
    )
    if not isinstance(embedded, SubprocessEndpoint):
        raise TypeError("the embedded engine is not a process")
    serve_options = embedded.command[embedded.command.index("serve") + 1 :]
    launcher = [sys.executable, "-P", str(SLOWED_SERVER), str(factor), str(from_m)]
    return SubprocessEndpoint([*launcher, *serve_options], "slowed", log=logs / "slowed.log", progress=False)


def summary(case: str, seed: int, seconds: float, verdict: Verdict) -> dict[str, Any]:
    return {
        "case": case,
        "seed": seed,
        "seconds": round(seconds, 1),
        "seconds_after_both_were_up": sum(
            verdict.seconds_by_part.get(part, 0.0) for part in ("canary text", "warm-up", "blocks of repeats")
        ),
        "verdict": verdict.status,
        "not_passed": {check.name: check.measured for check in verdict.failures},
        "points": [
            {
                "m": point.m,
                "status": point.status,
                "ratio": point.ratio,
                "interval": [point.ratio_low, point.ratio_high],
                "log_ratios": [round(value, 5) for value in point.log_ratios],
                "tokens_per_second": [point.artifact.output_throughput, point.baseline.output_throughput],
            }
            for point in verdict.curve
        ],
    }


def rates(runs: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """How often each verdict was given, by case."""
    return {case: dict(Counter(run["verdict"] for run in runs if run["case"] == case)) for case in CASES}


if __name__ == "__main__":
    main()
