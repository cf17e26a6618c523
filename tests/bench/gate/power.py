"""Which sizes of fault the gate catches, and how often: simulated after what sound runs recorded.

    python -P tests/bench/gate/power.py VERDICT [VERDICT ...] --runs 200

VERDICT is the `serving_check.json` of a sound artifact. Each simulated run draws from what one of them
recorded, so that the noise is the machine's, and puts a fault of one size into the artifact's part:

    power_of_repeats.py   pauses, and slow requests, in the repeats of the curve
    power_in_use.py       a load as in use, and a look at rest: slow Ms, wrong text, drift, memory kept

`--of` takes the faults of one of the two alone. A row says in which share of the runs the check that is for
the fault failed (`named`), and in which the verdict was no pass (`caught`: any check, inconclusive included).
A row of no fault tells false alarms. Sampling has a characteristic of its own (`sampling_characteristic.py`).
"""

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from scalegate.base.atomic_files import write_json
from scalegate.serving_check.evidence.verdict import Verdict
from scalegate.tests.bench.gate import power_in_use, power_of_repeats
from scalegate.tests.bench.gate.simulated_fault import SimulatedFault

RESULT = Path(__file__).parents[1] / "results" / "gate" / "power.json"
FAULTS = {"repeats": power_of_repeats.FAULTS, "in-use": power_in_use.FAULTS}


def row_of(fault: SimulatedFault, verdicts: Sequence[Verdict], runs: int) -> dict[str, Any]:
    generator = random.Random(fault.name)
    found = [fault.statuses(verdicts[run % len(verdicts)], generator) for run in range(runs)]
    named = sum(statuses.get(fault.check) == "fail" for statuses in found)
    failed = sum("fail" in statuses.values() for statuses in found)
    caught = sum(set(statuses.values()) != {"pass"} for statuses in found)
    return {
        "fault": fault.name,
        "check": fault.check or None,
        "runs": runs,
        "named": named / runs,
        "failed": failed / runs,
        "caught": caught / runs,
    }


def rows_of(
    of: Sequence[str], verdicts: Sequence[Verdict], runs: int, processes: int
) -> Iterator[dict[str, Any]]:
    places = [(part, index) for part in of for index in range(len(FAULTS[part]))]
    with ProcessPoolExecutor(processes) as pool:
        yield from pool.map(_row, places, [verdicts] * len(places), [runs] * len(places))


def _row(place: tuple[str, int], verdicts: Sequence[Verdict], runs: int) -> dict[str, Any]:
    part, index = place
    return row_of(FAULTS[part][index], verdicts, runs)


def described(verdict: Verdict) -> dict[str, Any]:
    """Where the repeats were recorded."""
    return {
        "artifact": verdict.artifact.name,
        "device": verdict.environment.device,
        "cpu_count": verdict.environment.cpu_count,
        "created": verdict.created,
        "ms": verdict.workload.ms,
        "blocks": {level.m: len(level.blocks) for level in verdict.evidence.measured},
    }


def read(path: Path) -> Verdict:
    verdict = Verdict.from_json(json.loads(path.read_text(encoding="utf-8")))
    if verdict.status == "fail":
        raise SystemExit(f"{path} is no sound artifact's: it failed")
    return verdict


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("verdicts", type=Path, nargs="+", metavar="VERDICT")
    parser.add_argument("--runs", type=int, default=200, help="of each fault")
    parser.add_argument("--of", choices=FAULTS, nargs="+", default=list(FAULTS))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    verdicts = [read(path) for path in options.verdicts]
    rows = []
    for row in rows_of(options.of, verdicts, options.runs, options.processes):
        rows.append(row)
        print(sentence(row), flush=True)
        write_json(options.out, {"recorded": [described(verdict) for verdict in verdicts], "rows": rows})


def sentence(row: dict[str, Any]) -> str:
    return (
        f"{row['fault']:52} {row['check'] or '':12} named {row['named']:.3f}  failed {row['failed']:.3f}  "
        f"caught {row['caught']:.3f}"
    )


if __name__ == "__main__":
    main()
