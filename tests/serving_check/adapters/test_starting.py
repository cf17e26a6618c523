"""Servers that start in the background, and never outlive what they were started for."""

import sys
import time
from pathlib import Path

import psutil
import pytest
from scalegate.base.errors import UserError
from scalegate.serving_check.adapters import SubprocessEndpoint
from scalegate.serving_check.adapters.starting import restart, starting

COUNTING_SERVER = Path(__file__).parents[1] / "counting_server.py"


def server(name: str, log: Path) -> SubprocessEndpoint:
    command = [sys.executable, "-P", str(COUNTING_SERVER), "0.001", "--port", "0"]
    return SubprocessEndpoint(command, name, log=log / f"{name}.txt", progress=False)


def never_ready(name: str, log: Path) -> SubprocessEndpoint:
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    return SubprocessEndpoint(command, name, log=log / f"{name}.txt", progress=False)


def broken(name: str, log: Path) -> SubprocessEndpoint:
    return SubprocessEndpoint(
        [sys.executable, "-c", "raise SystemExit('no memory')"],
        name,
        log=log / f"{name}.txt",
        progress=False,
    )


@pytest.fixture(autouse=True)
def none_is_left():
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    yield
    left = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
    assert not [child for child in left if child.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize("together", [True, False])
def test_they_start_meanwhile_and_come_in_their_order(tmp_path, together):
    with starting([server("one", tmp_path), server("other", tmp_path)], together) as endpoints:
        first, second = endpoints()
        assert first.base_url != second.base_url
        assert first.metrics() and second.metrics()
        assert endpoints() == [first, second]


def test_one_that_fails_is_reported_at_once_and_the_other_does_not_outlive_it(tmp_path):
    began = time.monotonic()
    with (
        pytest.raises(UserError, match="no memory"),
        starting([never_ready("slow", tmp_path), broken("broken", tmp_path)], together=True) as endpoints,
    ):
        endpoints()
    assert time.monotonic() - began < 120, "the slow one is given 1,800 s"


@pytest.mark.exhaustive
def test_they_are_started_anew_at_their_addresses(tmp_path):
    servers = [server("one", tmp_path), server("other", tmp_path)]
    with starting(servers, together=True) as endpoints:
        before = endpoints()
        processes = {server._process.pid for server in servers}
        restart(servers, together=True)
        assert all(endpoint.metrics() for endpoint in before)
        assert not processes & {server._process.pid for server in servers}


@pytest.mark.parametrize("together", [True, False])
def test_what_fails_meanwhile_ends_those_that_are_still_starting(tmp_path, together):
    servers = [never_ready("one", tmp_path), never_ready("other", tmp_path)]
    with pytest.raises(ZeroDivisionError), starting(servers, together):
        raise ZeroDivisionError
