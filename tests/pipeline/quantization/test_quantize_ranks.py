"""Quantizing in several processes: the same bytes for any number of them, and one that fails ends all."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from scalegate.base.errors import UserError
from scalegate.pipeline.commands.quantize import quantize
from scalegate.pipeline.quantization.shards import launch
from scalegate.pipeline.quantization.shards.ranks import OtherRankFailed, Ranks
from scalegate.serving_check.server.fork_server import start_process
from scalegate.tests.exhaustive import exhaustive_but
from scalegate.tests.pipeline.quantization import forked_quantize
from torch.distributed import HashStore, TCPStore

OPTIONS = {"max_shard_bytes": 300_000, "device": "cpu", "progress": False}


@pytest.fixture(scope="module")
def whole(two_layers: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made by one process. NVFP4: its scales are found in a pass over all weights."""
    out = tmp_path_factory.mktemp("whole") / "out"
    quantize(two_layers, "nvfp4", out, **OPTIONS)
    return out


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def in_processes(count: int, *words: Path | str, killed: int | None = None) -> list[int | None]:
    """Their exit codes; they have torchrun's environment, and are forks of one that has done the imports."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {
        "WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    ranks = []
    for rank in range(count):
        environment = common | {"RANK": str(rank)}
        arguments = (environment, words, OPTIONS, rank == killed)
        ranks.append(start_process(forked_quantize.quantize_as_rank, *arguments, name=f"rank {rank}"))
    children = [child for _, child in ranks]
    while all(child.is_alive() for child in children):
        time.sleep(0.02)
    for child in children:
        if killed is not None:
            child.kill()
        child.join(60)
    return [child.exitcode for child in children]


@pytest.mark.parametrize("count", exhaustive_but([2, 3], 2))
def test_the_bytes_are_those_of_one_process(whole: Path, two_layers: Path, tmp_path: Path, count: int):
    assert in_processes(count, two_layers, "nvfp4", tmp_path / "out") == [0] * count
    assert contents(tmp_path / "out") == contents(whole)


def test_one_of_two_is_killed_and_one_alone_finishes(whole: Path, two_layers: Path, tmp_path: Path):
    out = tmp_path / "out"
    assert -signal.SIGKILL in in_processes(2, two_layers, "nvfp4", out, killed=1)
    assert not (out / "scalegate.json").exists()
    finished = {path.name: path.stat().st_ino for path in out.glob("*.safetensors")}
    assert finished, "the killed one had finished a shard"
    quantize(two_layers, "nvfp4", out, **OPTIONS)
    assert contents(out) == contents(whole)
    assert finished.items() <= {path.name: path.stat().st_ino for path in out.iterdir()}.items()


@pytest.mark.exhaustive
def test_torchrun_runs_the_command_which_says_the_outcome_once(two_layers: Path, tmp_path: Path):
    words = ["quantize", str(two_layers), "--device", "cpu", "--out", str(tmp_path / "out")]
    run = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*run, "-m", "scalegate.pipeline", *words], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("linear weights quantized") == 1
    quantize(two_layers, out=tmp_path / "alone", device="cpu", progress=False)
    assert contents(tmp_path / "out") == contents(tmp_path / "alone")


def started(monkeypatch: pytest.MonkeyPatch, script: str) -> int:
    """The status of `--devices cpu,cpu` with `script` in the place of the pipeline; each must end with it."""
    monkeypatch.setattr(launch, "PIPELINE", (sys.executable, "-S", "-c", f"import os, sys, time\n{script}"))
    monkeypatch.setattr(launch, "GRACE_SECONDS", 1.0)
    began = time.monotonic()
    status = launch.run_on(launch.devices_of("cpu,cpu"), ["quantize", "MODEL"])
    assert time.monotonic() - began < 120, "it waited for one that sleeps"
    return status


def test_devices_are_a_process_each(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    script = f"""
name = os.environ['RANK'] + ' of ' + os.environ['WORLD_SIZE'] + ' '.join(['', *sys.argv[1:]])
open({str(tmp_path)!r} + '/' + name, 'w')
"""
    assert started(monkeypatch, script) == 0
    said = " of 2 quantize MODEL --device cpu"
    assert {path.name for path in tmp_path.iterdir()} == {f"0{said}", f"1{said}"}


def test_one_that_fails_or_is_killed_ends_those_that_go_on(monkeypatch: pytest.MonkeyPatch, capsys):
    assert started(monkeypatch, "sys.exit(2) if os.environ['RANK'] == '1' else time.sleep(600)") == 2
    assert capsys.readouterr().err == "", "a process says itself why it failed"
    killed = "os.kill(os.getpid(), 9) if os.environ['RANK'] == '1' else time.sleep(600)"
    assert started(monkeypatch, killed) == 70
    assert "process 1 on cpu was ended by SIGKILL; run the same command again" in capsys.readouterr().err


def test_devices_that_are_not_there_are_refused():
    with pytest.raises(UserError, match="'tpu9' is not a device"):
        launch.devices_of("tpu9")
    with pytest.raises(UserError, match="PyTorch finds"):
        launch.devices_of("90,91")


def in_threads(*works: Callable[[], None]) -> None:
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)


def test_whoever_is_free_takes_the_dearest_step_that_is_left():
    store = HashStore()
    took: dict[int, list[int]] = {0: [], 1: []}
    both_work = threading.Barrier(2)

    def work(rank: int) -> None:
        ranks = Ranks(store, rank, 2)
        ranks.meet("start")
        for step in ranks.deal("steps", [1, 9, 2, 8, 3, 7], lambda step: step):
            took[rank].append(step)
            if len(took[rank]) == 1:
                both_work.wait(60)

    in_threads(lambda: work(0), lambda: work(1))
    assert sorted(took[0] + took[1]) == [1, 2, 3, 7, 8, 9]
    assert took[0] == sorted(took[0], reverse=True)
    assert {took[0][0], took[1][0]} == {9, 8}
    alone = Ranks(HashStore())
    assert list(alone.deal("steps", [1, 9, 2], lambda step: step)) == [1, 9, 2]


def test_one_that_fails_ends_those_who_wait_with_its_reason_and_its_status():
    store, said = HashStore(), []

    def fails() -> None:
        with pytest.raises(UserError), Ranks(store, 1, 2).together():
            raise UserError("no such weight")

    def waits() -> None:
        ranks = Ranks(store, 0, 2)
        with pytest.raises(OtherRankFailed, match="process 1: no such weight") as caught, ranks.together():
            pass
        said.append(caught.value.exit_code)

    in_threads(fails, waits)
    assert said == [2]


def test_no_thread_calls_the_store_once_the_job_is_left(monkeypatch: pytest.MonkeyPatch):
    """Python aborts if it ends while a thread is inside PyTorch's store."""
    returned = threading.Event()

    def last_beat(_ranks: Ranks, ended: threading.Event) -> None:
        ended.wait()
        time.sleep(0.2)
        returned.set()

    monkeypatch.setattr(Ranks, "_beat", last_beat)
    with pytest.raises(UserError), Ranks(HashStore(), 1, 2).together():
        raise UserError("no such weight")
    assert returned.is_set()
