"""The GPU tests of kernels as on an older GPU: code for 8.0 or 8.9, translated by a Hopper GPU's driver.

    python -P tests/bench/kernels/older_gpu_tests.py --as 8.0 --out OUT
    python -P tests/bench/kernels/older_gpu_tests.py --as 8.0 --out REST --after OUT/tests_8.0.txt

Left out are the tests of Hopper's own kernels. The file is also the plugin of pytest that every process of
the tests loads before anything compiles. What has not ended after `--seconds` counts as not run. `--after`
leaves out what passed in an earlier run. Exit status 1 if a test failed or was not run.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

VARIABLE = "SCALEGATE_PRETENDED_GPU"
FOLDERS = ("kernels", "layouts", "serving_check")
HOPPERS_OWN = (
    "test_fp8_rows_gpu.py", "test_hopper_prefill_gpu.py", "test_int4_fp8_gpu.py", "test_int4_gpu.py",
    "test_int8_gpu.py", "test_iq2_xxs_gpu.py", "test_nvfp4_gpu.py", "test_pdl_gpu.py",
)  # fmt: skip
OUTCOME = re.compile(r"\[gw\d+\] \[ *\d+%\] (PASSED|FAILED|SKIPPED|ERROR) (.+?) *$", re.MULTILINE)
COUNT = re.compile(r"\[(\d+) items?\]")
"""Of the tests that a process has collected, but for those that are left out."""
REASONS = re.compile(r"(FAILED|ERROR|SKIPPED|E  )|=+ .* in ")
SHOWN_LINES, SHOWN_TESTS = 20, 10
LAST_SECONDS = 15
"""For pytest to tell of the tests that have failed, after it is interrupted."""


def pytest_configure() -> None:
    from scalegate.tests.bench.kernels.older_gpu import pretend

    pretend(*map(int, os.environ[VARIABLE].split(".")))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--as", dest="capability", default="8.0")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--after", type=Path, help="the log of an earlier run")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    log = options.out / f"tests_{options.capability}.txt"
    began = time.monotonic()
    run_tests(options, log)
    result = result_of(log.read_text(encoding="utf-8", errors="replace"), options.capability)
    result["seconds"] = round(time.monotonic() - began)
    log.with_suffix(".json").write_text(json.dumps(result, indent=1), encoding="utf-8")
    failed, not_run = result["failed"], result["not run"]
    print(f"as {options.capability}, {result['seconds']} s: {result['passed']} passed, {len(failed)} failed, "
          f"{result['skipped']} skipped, {not_run} not run", *failed[:SHOWN_TESTS], sep="\n  ")  # fmt: skip
    sys.exit(bool(failed or not_run))


def run_tests(options: argparse.Namespace, log: Path) -> None:
    from scalegate.tests.bench.gpu import PYTEST, ROOT, marked_gpu

    mark, expression, *files = marked_gpu()
    folders = tuple(str(ROOT / "tests" / folder) for folder in FOLDERS)
    chosen = [file for file in files if file.startswith(folders) and not file.endswith(HOPPERS_OWN)]
    command = [sys.executable, "-P", *PYTEST, "-p", "scalegate.tests.bench.kernels.older_gpu_tests"]
    command += ["--numprocesses", str(options.processes), "--dist", "worksteal", mark, expression, *chosen]
    if options.after:
        outcomes = outcomes_of(options.after.read_text(encoding="utf-8", errors="replace"))
        for test in (test for test, outcome in outcomes.items() if outcome == "PASSED"):
            command += ["--deselect", test]
    environment = {**os.environ, VARIABLE: options.capability}
    with log.open("w", encoding="utf-8") as file:
        tests = subprocess.Popen(
            command, env=environment, stdout=file, stderr=file, start_new_session=True
        )  # fmt: skip
        try:
            tests.wait(options.seconds - LAST_SECONDS)
        except subprocess.TimeoutExpired:
            tests.send_signal(signal.SIGINT)
            try:
                tests.wait(LAST_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(tests.pid, signal.SIGKILL)
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    print(*[line[:200] for line in lines if REASONS.match(line)][-SHOWN_LINES:], sep="\n")


def outcomes_of(said: str) -> dict[str, str]:
    return {test: outcome for outcome, test in OUTCOME.findall(said)}


def result_of(said: str, capability: str) -> dict[str, Any]:
    """What pytest said of each test."""
    outcomes = outcomes_of(said)
    counts = [int(count) for count in COUNT.findall(said)]
    failed = sorted(test for test, outcome in outcomes.items() if outcome in ("FAILED", "ERROR"))
    return {
        "as": capability,
        "passed": list(outcomes.values()).count("PASSED"),
        "skipped": list(outcomes.values()).count("SKIPPED"),
        "not run": max(counts, default=1) - len(outcomes),
        "failed": failed,
    }


if __name__ == "__main__":
    main()
