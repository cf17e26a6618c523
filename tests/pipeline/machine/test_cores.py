"""How many threads a model gets: a core is left free, and logical cores do not count twice."""

import os
import subprocess
import sys

import pytest
import torch
from scalegate.pipeline.machine import cores
from scalegate.pipeline.validation.serving import on_all_cores


@pytest.mark.parametrize(
    ("physical", "available", "threads", "alone"),
    [(2, 2, 1, 2), (1, 1, 1, 1), (8, 8, 7, 8), (8, 16, 8, 8), (64, 2, 1, 2), (None, 4, 3, 4)],
)
def test_a_core_is_left_to_the_server(monkeypatch, physical, available, threads, alone):
    monkeypatch.setattr(cores, "available_cores", lambda: available)
    monkeypatch.setattr(cores.psutil, "cpu_count", lambda logical: physical)
    assert (cores.model_threads(), cores.threads_alone()) == (threads, alone)


def test_answers_are_scored_on_all_cores_unless_the_user_chose_the_threads():
    before = torch.get_num_threads()
    try:
        for chosen, used in (
            (cores.model_threads(), cores.threads_alone()),
            (cores.threads_alone() + 3, cores.threads_alone() + 3),
        ):
            torch.set_num_threads(chosen)
            with on_all_cores():
                assert torch.get_num_threads() == used
            assert torch.get_num_threads() == chosen
    finally:
        torch.set_num_threads(before)


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
