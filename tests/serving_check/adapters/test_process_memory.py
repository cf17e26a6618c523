"""The memory of a server's processes: by its own word if it tells, else by this machine's process table."""

import subprocess
import sys
from dataclasses import replace

from scalegate.serving_check.adapters import Endpoint
from scalegate.serving_check.adapters.process_memory import resident_bytes, resident_bytes_of_tree
from scalegate.serving_check.adapters.prometheus_text import by_label
from scalegate.serving_check.adapters.series import SCALEGATE_SERIES, VLLM_SERIES

HELD = 64 << 20
CHILD = f"held = b'x' * {HELD}; print('held', flush=True); input()"
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {CHILD!r}])"


def test_what_a_grandchild_holds_belongs_to_the_tree():
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None and parent.stdout.readline() == b"held\n"
        own, tree = resident_bytes(parent.pid), resident_bytes_of_tree(parent.pid)
        parent.communicate(b"\n")
    assert own is not None and tree is not None
    assert own < HELD < tree
    assert resident_bytes(parent.pid) is resident_bytes_of_tree(parent.pid) is None, "it has ended"


def test_the_servers_own_word_comes_before_the_process_table():
    endpoint = Endpoint("http://127.0.0.1:1", "m", resident_bytes=lambda: 7)
    told = {'process_resident_memory_bytes{process="engine"}': 3.0}
    assert endpoint.memory_bytes(told) == 3
    assert endpoint.memory_bytes({}) == 7
    assert replace(endpoint, series=VLLM_SERIES).memory_bytes(told) == 7, "vLLM tells of one process alone"
    assert Endpoint("http://127.0.0.1:1", "m").memory_bytes({}) is None


def test_our_server_tells_the_memory_of_each_of_its_processes(server: Endpoint):
    told = by_label(server.metrics(), SCALEGATE_SERIES.memory, "process")
    assert set(told) == {"server", "engine", "text"}
    # Torch alone takes more than the text of all requests.
    assert told["engine"] > told["server"] > 16 << 20
