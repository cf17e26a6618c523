"""The soak in small, on a CPU: the bench `soak.py` as it runs on a GPU, with fewer and shorter requests."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

SOAK = Path(__file__).parents[2] / "bench" / "engine" / "soak.py"
SMALL = {
    "requests": 40,
    "rate": 1000,
    "max-prompt": 48,
    "max-output": 80,
    "cancelled": 0.1,
    "max-num-seqs": 8,
    "kv-cache-tokens": 256,
    "alone": 16,
}


@pytest.mark.exhaustive
def test_nothing_is_lost_among_arrivals_departures_and_preemptions(example_checkpoint: Path, tmp_path: Path):
    options = [word for name, value in SMALL.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-P", str(SOAK), str(example_checkpoint), *options]
    done = subprocess.run([*command, "--out", str(tmp_path / "soak.json")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "soak.json").read_text(encoding="utf-8"))
    assert report["preemptions"] > 0 and report["left"] > 0
    assert report["sent_again_alone"] > 8 and report["differing_alone"] == []
    assert report["compilations"] == {} and report["pool_used_at_end"] == 0
