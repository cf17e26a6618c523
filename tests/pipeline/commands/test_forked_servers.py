"""Servers on a CPU fork their processes from one that has imported what these need."""

import importlib.util
import os
import sys

import pytest
from scalegate.pipeline.cli.forked_servers import NEEDED, servers_forked
from scalegate.serving_check.adapters.all_engines import DEFAULT_ENGINE
from scalegate.serving_check.server.fork_server import start_process
from scalegate.tests.serving_check.server import forked_mains


@pytest.mark.parametrize("module", NEEDED)
def test_every_module_that_is_imported_beforehand_exists(module: str):
    assert importlib.util.find_spec(module) is not None


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux sends a fork server descriptors and signals")
def test_a_server_s_processes_are_forked_from_another_one():
    with servers_forked(DEFAULT_ENGINE, "cpu"):
        connection, process = start_process(forked_mains.tell, "", name="tells")
        with connection:
            assert connection.recv()["parent"] != os.getpid()
        process.join(60)
    assert process.exitcode == 0
