"""The zoo's faulty servers, each fault by itself, with a line for each run: faults that depend on time first.

    python -P -m scalegate.tests.zoo.each_fault --runs 3 --seconds 480 --share 2/7 [NAME…]

`--share 2/7` takes every seventh run, from the second on: seven such processes side by side, each on cores of
its own, run all. No run is begun after `--seconds`. A line is a JSON object. Exit status 1 if a fault was not
caught by its check. A fault takes from ten seconds to a minute on two cores.
"""

import argparse
import itertools
import json
import sys
import tempfile
import time
from pathlib import Path

from scalegate.pipeline.cli.forked_servers import servers_forked
from scalegate.pipeline.commands.layout import layout
from scalegate.pipeline.commands.quantize import quantize
from scalegate.serving_check.checks.failures import NAME as FAILURES
from scalegate.serving_check.checks.in_use.as_asked import NAME as AS_ASKED
from scalegate.serving_check.checks.in_use.logprobs import NAME as LOGPROBS
from scalegate.serving_check.checks.in_use.sampling import NAME as SAMPLING
from scalegate.serving_check.checks.in_use.text import NAME as TEXT_IN_USE

from .all_server_faults import FAULTS
from .both_servers import is_named, judged_with, not_passed, zoo_of
from .server_fault import Fault

EXAMPLE = Path(__file__).parents[2] / "examples" / "qwen3-pycode-5m"
OF_ANSWERS = {FAILURES, AS_ASKED, LOGPROBS, SAMPLING, TEXT_IN_USE}
"""Checks of what answers say, whenever they say it."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="Faults to run; all, unless named.")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--share", default="1/1", metavar="I/N")
    options = parser.parse_args()
    ends = time.monotonic() + options.seconds
    first, shares = map(int, options.share.split("/"))
    cases = cases_of([FAULTS[name] for name in options.names or FAULTS], options.runs)
    missed = 0
    with tempfile.TemporaryDirectory() as work, servers_forked("embedded", "cpu"):
        artifact, logs = Path(work) / "artifact", Path(work) / "logs"
        logs.mkdir()
        quantize(str(EXAMPLE), "int4-hqq", out=artifact, progress=False)
        # Without it, INT4 is too slow at M=32 on a CPU with AMX: a fault of its own.
        layout(artifact, progress=False)
        with zoo_of(artifact, EXAMPLE, logs) as zoo:
            for fault, run in itertools.islice(cases, first - 1, None, shares):
                if time.monotonic() > ends:
                    break
                began = time.monotonic()
                judgement = judged_with(zoo, fault, run)
                is_caught = fault.check in not_passed(judgement)
                missed += not is_caught
                row = {
                    "fault": fault.name,
                    "run": run,
                    "check": fault.check,
                    "caught": is_caught,
                    "named": is_named(fault, judgement),
                    "seconds": round(time.monotonic() - began, 1),
                    "not_passed": not_passed(judgement),
                }
                print(json.dumps(row), flush=True)
    sys.exit(1 if missed else 0)


def cases_of(faults: list[Fault], runs: int) -> list[tuple[Fault, int]]:
    """A run of each fault that depends on time, a run of each other one, and so on."""
    ordered = sorted(faults, key=lambda fault: fault.check in OF_ANSWERS)
    return [(fault, run) for run in range(runs) for fault in ordered]


if __name__ == "__main__":
    main()
