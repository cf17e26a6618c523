"""Runs the tests of `interpreted/` under Triton's interpreter, in two processes of their own at a time."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

FOLDER = Path(__file__).parent / "interpreted"
COMMAND = [sys.executable, "-P", "-m", "pytest", "-q", "-m", "not gpu", str(FOLDER), "--share"]
ENVIRONMENT = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


@pytest.mark.timeout(600)  # Some 270 tests, beside those of another worker.
def test_kernels_agree_with_their_references_under_the_interpreter(tmp_path):
    pytest.importorskip("triton")
    logs = [tmp_path / "first.log", tmp_path / "second.log"]
    processes = []
    for share, log in enumerate(logs, start=1):
        with open(log, "wb") as file:
            command = [*COMMAND, f"{share}/{len(logs)}"]
            environment = {**os.environ, **ENVIRONMENT}
            processes.append(
                subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT)
            )
    statuses = [process.wait() for process in processes]
    for status, log in zip(statuses, logs, strict=True):
        output = log.read_text(encoding="utf-8")
        assert status == 0, output[-6000:]
        assert " passed" in output
