"""How many threads a model gets: a core is left free, and logical cores do not count twice."""

import os
import subprocess
import sys

import pytest
from scalegate.pipeline.machine import cores


@pytest.mark.parametrize(
    ("physical", "available", "threads"),
    [(2, 2, 1), (1, 1, 1), (8, 8, 7), (8, 16, 8), (64, 2, 1), (None, 4, 3)],
)
def test_a_core_is_left_to_the_server(monkeypatch, physical, available, threads):
    monkeypatch.setattr(cores, "available_cores", lambda: available)
    monkeypatch.setattr(cores.psutil, "cpu_count", lambda logical: physical)
    assert cores.model_threads() == threads


@pytest.mark.parametrize(("given", "threads"), [(None, cores.model_threads()), ("3", 3)])
def test_openmp_is_told_before_torch_unless_the_user_told_it(given, threads):
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environment |= {} if given is None else {"OMP_NUM_THREADS": given}
    script = (
        "import os, sys, scalegate.pipeline; print(os.environ['OMP_NUM_THREADS'], 'torch' in sys.modules)"
    )
    command = [sys.executable, "-P", "-c", script]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert said.split() == [str(threads), "False"]
