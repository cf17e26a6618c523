"""The zoo's faulty servers, each fault by itself, with a line for each run: faults that depend on time first.

    python -P -m scalegate.tests.zoo.each_fault --runs 3 --timed-runs 20 --seconds 480 --share 2/7 [NAME…]

`--share 2/7` takes every seventh run, from the second on: seven such processes side by side, each on cores of
its own, run all. `--done EARLIER.jsonl` leaves out the runs that stand there. No run is begun after
`--seconds`. NAME may be several faults with `+` between them, or `all`, which are all that equal requests
hide: they are on at once, and count as caught if the verdict is a fail. They leave the server's memory in
disorder, so they have a call of their own. A line is a JSON object. Exit status 1 if a fault was not caught
by its check. A fault takes from ten seconds to a minute on two cores.
"""

import argparse
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from scalegate.pipeline.cli.forked_servers import servers_forked
from scalegate.pipeline.commands.layout import layout
from scalegate.pipeline.commands.quantize import quantize
from scalegate.serving_check.checks.failures import NAME as FAILURES
from scalegate.serving_check.checks.in_use.as_asked import NAME as AS_ASKED
from scalegate.serving_check.checks.in_use.drift import NAME as DRIFT
from scalegate.serving_check.checks.in_use.logprobs import NAME as LOGPROBS
from scalegate.serving_check.checks.in_use.profile import NAME as PROFILE
from scalegate.serving_check.checks.in_use.sampling import NAME as SAMPLING
from scalegate.serving_check.checks.in_use.speed import NAME as SPEED_IN_USE
from scalegate.serving_check.checks.in_use.text import NAME as TEXT_IN_USE
from scalegate.serving_check.checks.latency import NAME as LATENCY
from scalegate.serving_check.checks.plausible import NAME as PLAUSIBLE
from scalegate.serving_check.checks.reached import NAME as M_REACHED
from scalegate.serving_check.checks.stalls import NAME as STALLS
from scalegate.serving_check.checks.streamed import NAME as STREAMED
from scalegate.serving_check.checks.throughput import NAME as THROUGHPUT

from .all_server_faults import FAULTS
from .both_servers import IN_USE, Zoo, is_named, judged_with, measured, not_passed, zoo_of
from .server_fault import TOGETHER

EXAMPLE = Path(__file__).parents[2] / "examples" / "qwen3-pycode-5m"
OF_ANSWERS = {FAILURES, AS_ASKED, LOGPROBS, SAMPLING, TEXT_IN_USE}
"""Checks of what answers say, whenever they say it."""
OF_TIME = {THROUGHPUT, LATENCY, STALLS, SPEED_IN_USE, DRIFT, PROFILE, M_REACHED, PLAUSIBLE, STREAMED}
"""Checks whose figures are seconds, or that a slow machine could mislead."""
ALL = "all"
"""Every fault that a load of equal requests hides, at once."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="Faults to run; each and `all`, unless named."
    )
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--timed-runs", type=int, default=0, help="Of faults that depend on time, if more.")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--share", default="1/1", metavar="I/N")
    parser.add_argument("--done", type=Path, nargs="*", default=[], metavar="EARLIER.jsonl")
    options = parser.parse_args()
    ends = time.monotonic() + options.seconds
    first, shares = map(int, options.share.split("/"))
    done = {(row["fault"], row["run"]) for path in options.done for row in rows_of(path)}
    cases = cases_of(options.names or list(FAULTS), options.runs, options.timed_runs, done)
    missed = 0
    with tempfile.TemporaryDirectory() as work, servers_forked("embedded", "cpu"):
        artifact, logs = Path(work) / "artifact", Path(work) / "logs"
        logs.mkdir()
        quantize(str(EXAMPLE), "int4-hqq", out=artifact, progress=False)
        # Without it, INT4 is too slow at M=32 on a CPU with AMX: a fault of its own.
        layout(artifact, progress=False)
        with zoo_of(artifact, EXAMPLE, logs) as zoo:
            for name, run in itertools.islice(cases, first - 1, None, shares):
                if time.monotonic() > ends:
                    break
                row = run_once(zoo, name, run)
                missed += not row["caught"]
                print(json.dumps(row), flush=True)
    sys.exit(1 if missed else 0)


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The rows of an earlier call, wherever other lines stand between them."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines if line.startswith('{"fault"')]


def cases_of(
    names: Sequence[str], runs: int, timed_runs: int, done: Collection[tuple[str, int]] = ()
) -> list[tuple[str, int]]:
    """A run of each fault that depends on time, a run of each other one, and so on; the `timed_runs` last."""
    ordered = sorted(names, key=lambda name: name in FAULTS and FAULTS[name].check in OF_ANSWERS)
    timed = [name for name in names if name in FAULTS and FAULTS[name].check in OF_TIME]
    cases = [(name, run) for run in range(runs) for name in ordered]
    cases += [(name, run) for run in range(runs, timed_runs) for name in timed]
    return [case for case in cases if case not in done]


def run_once(zoo: Zoo, name: str, run: int) -> dict[str, Any]:
    """Judge the server with this fault, or with several at once, and say what was found."""
    began = time.monotonic()
    if name == ALL or TOGETHER in name:
        names = name.split(TOGETHER) if name != ALL else hidden_faults()
        judgement = zoo.judged(TOGETHER.join(names), workload=replace(IN_USE, seed=2 + run), in_use=True)
        found = {"caught": judgement.status == "fail"}
    else:
        fault = FAULTS[name]
        judgement = judged_with(zoo, fault, run)
        found = {
            "check": fault.check,
            "check_status": next(check.status for check in judgement.checks if check.name == fault.check),
            "caught": fault.check in not_passed(judgement),
            "named": is_named(fault, judgement),
            "measured": measured(judgement, fault.check),
        }
    return {
        "fault": name,
        "run": run,
        "status": judgement.status,
        **found,
        "seconds": round(time.monotonic() - began, 1),
        "not_passed": not_passed(judgement),
    }


def hidden_faults() -> list[str]:
    return [name for name, fault in FAULTS.items() if fault.in_use and fault.profile is None]


if __name__ == "__main__":
    main()
