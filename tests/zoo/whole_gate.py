"""The zoo's artifacts through all of `pipeline validate`, servers and load included, a sound one beside them.

    python -P -m scalegate.tests.zoo.whole_gate --runs 3 [NAME…]

A row says which checks failed. Exit status 1 where a fault passed the check that it is for, or where a sound
artifact failed. A run of all takes ten minutes on two cores; `test_artifacts.py` has what needs no server.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from scalegate.base.errors import UserError
from scalegate.pipeline.commands.validate import validate

from .artifacts import FAULTS, ArtifactFault, break_artifact
from .sound_artifacts import Sound, make_sound

EXAMPLE = Path(__file__).parents[2] / "examples" / "qwen3-pycode-5m"
WORKLOAD = {"m": (1, 8), "input_len": 32, "output_len": 32, "quality_tokens": 2048}
"""No fault here is of long requests; `test_artifacts.py` judges quality."""
SOUND = "sound"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="Faults to run; all, unless named.")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--first-run", type=int, default=0, help="Seed of the first run, to continue with.")
    options = parser.parse_args()
    chosen = [FAULTS[name] for name in options.names or FAULTS]
    missed = 0
    with tempfile.TemporaryDirectory() as work:
        kinds = make_sound(EXAMPLE, Path(work))
        for run in range(options.first_run, options.first_run + options.runs):
            for fault in (None, *chosen):
                folder = kinds[fault.of if fault else "int4"].copy(
                    Path(work) / f"{run}-{fault.name if fault else SOUND}"
                )
                missed += not caught(fault, folder, kinds, run)
    sys.exit(1 if missed else 0)


def caught(fault: ArtifactFault | None, folder: Path, kinds: dict[str, Sound], run: int) -> bool:
    """Whether the gate said of this artifact what it should; prints a row."""
    started = time.monotonic()
    failed: dict[str, str] = {}
    try:
        if fault is not None:
            break_artifact(folder, fault, run)
        baseline = kinds[fault.of if fault else "int4"].baseline
        verdict = validate(folder, baseline, device="cpu", seed=run, progress=False, **WORKLOAD)
        failed = {check.name: check.reason for check in verdict.checks if check.status == "fail"}
        status = verdict.status
    except UserError as error:
        failed, status = {"refused": error.message}, "refused"
    right = not failed if fault is None else fault.words in failed.get(fault.check, "")
    row = (
        fault.name if fault else SOUND,
        status,
        ", ".join(failed) or "-",
        f"{time.monotonic() - started:.0f} s",
    )
    print("ok    " if right else "MISSED", *row, sep=" | ", flush=True)
    for name, reason in {} if right else failed.items():
        print(f"         {name}: {reason}", flush=True)
    return right


if __name__ == "__main__":
    main()
