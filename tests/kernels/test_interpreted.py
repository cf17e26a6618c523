"""Runs the tests of `interpreted/` under Triton's interpreter, in a process of their own."""

import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent / "interpreted"


def test_kernels_agree_with_their_references_under_the_interpreter():
    result = subprocess.run(
        [sys.executable, "-P", "-m", "pytest", "-q", "-m", "not gpu", str(FOLDER)],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-6000:]
    assert " passed" in result.stdout
