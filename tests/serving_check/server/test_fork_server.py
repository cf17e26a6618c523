"""Processes of servers that are forked: what a spawned one would be, and never alive after their client."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from scalegate.serving_check.server.fork_server import ADDRESS, SET_BY_IMPORTS, fork_server, start_process
from scalegate.tests.serving_check.server import forked_mains


@pytest.fixture(autouse=True, scope="module")
def forking():
    with fork_server([]):
        yield


def told(word: str = "") -> dict:
    connection, process = start_process(forked_mains.tell, word, name="tells")
    with connection:
        answer = connection.recv()
    process.join(60)
    assert process.exitcode == 0
    return answer


def test_processes_come_from_one_that_is_not_this_one():
    first, second = told(), told()
    assert first["pid"] != second["pid"] and first["parent"] == second["parent"] != os.getpid()


def test_a_fork_has_the_environment_folder_and_output_of_its_client(tmp_path: Path):
    environment = {**os.environ, "MARK": "its own"}
    pipes = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "timeout": 60}
    client = subprocess.run(
        [sys.executable, "-P", forked_mains.__file__, "tell"], cwd=tmp_path, env=environment, **pipes
    )
    assert "said by the fork" in client.stdout, client.stderr
    assert str(tmp_path) in client.stdout and "its own" in client.stdout


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "PYTHONHASHSEED"])
def test_where_libraries_would_be_imported_otherwise_a_process_is_spawned(name, monkeypatch):
    monkeypatch.setenv(name, "7")
    assert told()["parent"] == os.getpid()


@pytest.mark.parametrize("name", SET_BY_IMPORTS)
def test_what_imports_of_a_command_set_is_no_other_environment(name, monkeypatch):
    monkeypatch.setenv(name, "1")
    assert told()["parent"] != os.getpid()


def test_without_a_fork_server_a_process_is_spawned(monkeypatch):
    monkeypatch.setenv(ADDRESS, "/nowhere")
    assert told()["parent"] == os.getpid()
    monkeypatch.delenv(ADDRESS)
    assert told()["parent"] == os.getpid()


def test_a_forks_exit_status_is_known():
    _, process = start_process(forked_mains.leave, 7, name="leaves")
    process.join(60)
    assert process.exitcode == 7 and not process.is_alive()


def test_a_fork_can_be_killed():
    connection, process = start_process(forked_mains.wait_for_ever, name="waits")
    pid = connection.recv()
    process.join(0)
    assert process.is_alive()
    process.kill()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL and is_gone(pid)


def test_a_fork_does_not_outlive_a_killed_client():
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-P", forked_mains.__file__, "wait"], **pipes) as client:
        pid = int(client.stdout.readline())
        assert psutil.Process(pid).ppid() != client.pid, "it was spawned"
        client.kill()
    ends = time.monotonic() + 60
    while not is_gone(pid):
        assert time.monotonic() < ends, "it lives on"
        time.sleep(0.02)


def test_a_process_and_its_client_may_end_at_the_same_time():
    """Which the fork server then learns at once."""
    parent = told()["parent"]
    connection, process = start_process(forked_mains.wait_for_ever, name="waits")
    pid = connection.recv()
    os.kill(parent, signal.SIGSTOP)
    os.kill(pid, signal.SIGKILL)
    while not is_gone(pid):
        time.sleep(0.01)
    del process
    os.kill(parent, signal.SIGCONT)
    assert told()["parent"] == parent


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
