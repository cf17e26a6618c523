"""Servers started as processes of ours, and servers that somebody else started."""

import http.server
import json
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import ClassVar
from urllib.error import HTTPError
from urllib.request import urlopen

import psutil
import pytest
from scalegate.base.errors import UserError
from scalegate.serving_check.adapters import SubprocessEndpoint, UrlEndpoint
from scalegate.serving_check.adapters.engine import MemoryGrant, ServerJob
from scalegate.serving_check.adapters.external_command import free_port
from scalegate.serving_check.adapters.placement import Placement
from scalegate.serving_check.adapters.prometheus_text import by_label, parse_metrics, total
from scalegate.serving_check.adapters.sglang import LONGER_CONTEXT, SGLANG, SPARE_TOKENS
from scalegate.serving_check.adapters.subprocess_endpoint import LogReader, Telemetry
from scalegate.serving_check.adapters.vllm import VLLM
from scalegate.serving_check.adapters.vllm_log import COMPILATIONS, ending_of
from scalegate.serving_check.engine.options import EngineOptions
from scalegate.serving_check.workload import WorkloadSpec, run_workload

pytestmark = pytest.mark.long

COUNTING_SERVER = Path(__file__).parents[1] / "counting_server.py"
COMMAND = [sys.executable, "-P", str(COUNTING_SERVER), "0.001"]


def gone(pid: int, seconds: float = 60.0) -> bool:
    """Whether the process ends within that time; a zombie has ended."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


def test_it_starts_on_a_port_of_its_own_serves_and_stops(tmp_path):
    endpoint = SubprocessEndpoint(COMMAND, "counting", log=tmp_path / "log.txt")
    with endpoint as first, SubprocessEndpoint(COMMAND, "second", log=tmp_path / "2.txt") as second:
        assert first.base_url != second.base_url
        assert first.model == "counting"
        assert total(first.metrics(), "vllm:num_requests_running") == 0
        assert UrlEndpoint(first.base_url + "/v1/").start() == first
        processes = psutil.Process(endpoint._process.pid).children(recursive=True)
        assert len(processes) >= 2
    assert all(gone(process.pid) for process in processes)
    endpoint.stop()


def test_only_one_that_can_be_told_its_port_keeps_its_address(tmp_path):
    told = SubprocessEndpoint([*COMMAND, "--port", "0"], "told", log=tmp_path / "log.txt")
    assert told.keeps_address
    assert SubprocessEndpoint(
        COMMAND, "fixed", log=tmp_path / "1", base_url="http://127.0.0.1:9"
    ).keeps_address
    assert not SubprocessEndpoint(COMMAND, "own choice", log=tmp_path / "2").keeps_address
    before = told.start()
    told.restart()
    try:
        assert before.metrics(), "it answers where it answered before"
    finally:
        told.stop()


def test_a_command_that_dies_is_reported_with_its_last_words(tmp_path):
    script = "import sys; print('loading'); print('no such device: tpu', file=sys.stderr); sys.exit(3)"
    endpoint = SubprocessEndpoint([sys.executable, "-c", script], "broken", log=tmp_path / "log.txt")
    with pytest.raises(UserError, match=r"broken ended before it served(.|\n)*no such device: tpu") as raised:
        endpoint.start()
    assert str(tmp_path / "log.txt") in raised.value.message


def test_a_command_that_does_not_exist_is_reported(tmp_path):
    with pytest.raises(UserError, match="cannot start no-such-engine"):
        SubprocessEndpoint(["no-such-engine"], "absent", log=tmp_path / "log.txt").start()


def give_up_once_it_has_spoken(endpoint: SubprocessEndpoint) -> None:
    """Its time to start is over when there is a line in its log, however long that takes here."""

    def watch() -> None:
        while not (endpoint.log.exists() and endpoint.log.read_text().endswith("\n")):
            time.sleep(0.02)
        endpoint.startup_timeout = 0.0

    threading.Thread(target=watch, daemon=True).start()


def test_a_command_that_never_serves_is_ended(tmp_path):
    command = [sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(600)"]
    endpoint = SubprocessEndpoint(command, "hung", log=tmp_path / "log.txt")
    give_up_once_it_has_spoken(endpoint)
    with pytest.raises(UserError, match="did not serve within") as raised:
        endpoint.start()
    pid = (tmp_path / "log.txt").read_text().strip()
    assert gone(int(pid))
    assert f"it last said '{pid}'" in raised.value.message and "--startup-timeout" in raised.value.message
    assert "\n" not in raised.value.message


ENDING_ENGINE = """
import http.server, sys, threading, time
port, said = int(sys.argv[1]), sys.argv[2]
lost = []
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/end":
            print(said, flush=True)
            lost.append(True)
            threading.Timer(0.5, server.shutdown).start()
        self.send_response(503 if lost else 200)
        self.end_headers()
        self.wfile.write(b'{"data": [{"id": "it"}]}')
    def log_message(self, *_): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
server.serve_forever()
"""


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("[shutdown] MPClient: engine core exited unexpectedly; starting cleanup", "exited unexpectedly"),
        ("EngineCore encountered a fatal error.\ntorch.OutOfMemoryError: CUDA out of memory.", "OutOfMemory"),
        ("EngineCore encountered a fatal error.\nRuntimeError: CUDA error: an illegal memory access", None),
    ],
)
def test_a_server_that_has_lost_its_engine_is_given_time_to_end_and_its_log_tells_whose_doing(
    tmp_path, said: str, why: str | None
):
    port = str(free_port())
    url = f"http://127.0.0.1:{port}"
    endpoint = SubprocessEndpoint(
        [sys.executable, "-c", ENDING_ENGINE, port, said],
        "vllm M",
        log=tmp_path / "log",
        base_url=url,
        telemetry=Telemetry(log=LogReader(ending=ending_of)),
    )
    endpoint.start()
    try:
        assert endpoint.why_gone() is None, "it serves"
        with pytest.raises(HTTPError):
            urlopen(f"{url}/end")
        reason = endpoint.why_gone()
        assert not endpoint.is_running()
        assert reason is None if why is None else why in str(reason) and "while it served" in str(reason)
    finally:
        endpoint.stop()


def test_one_that_ignores_sigterm_is_killed_with_its_children(tmp_path):
    script = (
        "import os, signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
        "print(os.getpid(), child.pid, flush=True); time.sleep(600)"
    )
    log = tmp_path / "log.txt"
    endpoint = SubprocessEndpoint([sys.executable, "-c", script], "stubborn", log=log)
    endpoint.stop_timeout = 0.5
    give_up_once_it_has_spoken(endpoint)
    with pytest.raises(UserError, match="did not serve"):
        endpoint.start()
    pids = [int(pid) for pid in log.read_text().split()]
    assert len(pids) == 2 and all(gone(pid) for pid in pids)


def test_nothing_is_orphaned_when_the_parent_is_killed(tmp_path):
    log = tmp_path / "log.txt"
    parent = (
        "import sys, time; from pathlib import Path;"
        "from scalegate.serving_check.adapters import SubprocessEndpoint;"
        f"SubprocessEndpoint({COMMAND!r}, 'counting', log=Path({str(log)!r})).start();"
        "print('up', flush=True); time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-P", "-c", parent], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"up\n"
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) >= 3
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert all(gone(child.pid) for child in children)


@pytest.mark.parametrize(
    ("url", "message"),
    [("http://127.0.0.1:9", "no server answers"), ("nonsense", "is not a URL")],
)
def test_a_url_where_nothing_serves(url, message):
    with pytest.raises(UserError, match=message):
        UrlEndpoint(url).start()


class Strict(http.server.BaseHTTPRequestHandler):
    """Lists a model, and refuses fields that OpenAI does not have."""

    asked: ClassVar[list[set[str]]] = []

    def do_GET(self) -> None:
        self.answer(200, {"data": [{"id": "strict"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(set(body))
        self.answer(400 if {"return_token_ids", "repetition_penalty"} & set(body) else 200, {})

    def answer(self, status: int, body: dict) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, format: str, *arguments: object) -> None:
        """Say nothing of each request."""


def test_a_server_that_refuses_a_field_it_does_not_know_is_not_sent_it_again():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Strict) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        endpoint = UrlEndpoint(f"http://127.0.0.1:{server.server_port}").start()
        assert endpoint.model == "strict" and not endpoint.takes_return_token_ids
        assert not endpoint.takes_repetition_penalty
        spec = WorkloadSpec(m=1, num_requests=1, input_len=2, output_len=3, keep_answers=True)
        for variant in (endpoint, replace(endpoint, takes_return_token_ids=True)):
            run_workload(variant, spec)
        server.shutdown()
    assert ["return_token_ids" in fields for fields in Strict.asked] == [True, False, False, True]
    assert ["repetition_penalty" in fields for fields in Strict.asked] == [False, True, False, False]


def test_a_url_that_wants_a_key(tmp_path):
    keyed = SubprocessEndpoint([*COMMAND, "key"], "keyed", log=tmp_path / "log.txt")
    keyed.api_key = "key"
    with keyed as endpoint:
        with pytest.raises(UserError, match="answered 401"):
            UrlEndpoint(endpoint.base_url).start()
        assert UrlEndpoint(endpoint.base_url, api_key="key").start() == endpoint


def test_vllm_is_started_by_its_own_command_and_missed_by_name(tmp_path, monkeypatch):
    options = EngineOptions(max_num_seqs=16, dtype="bfloat16")
    job = ServerJob("vllm", "artifact", tmp_path, options, tmp_path / "log.txt", MemoryGrant(0.45, 1 << 30))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="no 'vllm' command"):
        VLLM.server(job)
    assert not VLLM.availability().available
    (tmp_path / "vllm").touch(0o755)
    assert VLLM.availability().available
    server = VLLM.server(job)
    words = " ".join(server.command)
    assert words.startswith(f"vllm serve {tmp_path} ") and "--no-enable-prefix-caching" in words
    assert "--max-num-seqs 16 --gpu-memory-utilization 0.4500 --kv-cache-memory-bytes 1073741824" in words
    assert "--dtype bfloat16" in words
    assert server.base_url == "http://127.0.0.1:" + server.command[server.command.index("--port") + 1]
    series = server.telemetry.series
    assert series.compilations == COMPILATIONS and series.running == "vllm:num_requests_running"


def test_sglang_is_started_by_its_own_command_on_its_own_gpus(tmp_path, monkeypatch):
    options = EngineOptions(max_num_seqs=16, kv_cache_tokens=4096, kv_cache_dtype="fp8", max_model_len=256)
    placement = Placement(tensor_parallel_size=2, engine_args="--attention-backend fa3")
    job = ServerJob(
        "sglang", "artifact", tmp_path, options, tmp_path / "log", placement=placement, devices=(2, 3)
    )
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(UserError, match="no 'sglang' command"):
        SGLANG.server(job)
    (tmp_path / "sglang").touch(0o755)
    server = SGLANG.server(job)
    words = " ".join(server.command)
    assert words.startswith(f"sglang serve --model-path {tmp_path} ") and "--disable-radix-cache" in words
    context, pool = 256 + SPARE_TOKENS, 4096 + 16 * SPARE_TOKENS
    assert f"--max-running-requests 16 --context-length {context} --max-total-tokens {pool}" in words
    assert words.endswith("--kv-cache-dtype fp8_e4m3 --tp-size 2 --attention-backend fa3")
    assert server.env == {"CUDA_VISIBLE_DEVICES": "2,3", LONGER_CONTEXT: "1"}
    assert server.telemetry.renewal_s == 30
    said = server.telemetry.log.failure("x\nRuntimeError: Not enough memory. Please try to increase it\n")
    assert said is not None and "--mem-fraction-static" in said


def test_prometheus_text_is_read_and_summed():
    samples = parse_metrics(
        '# HELP a x\na{model_name="m",engine="0"} 3.0\na{model_name="m",engine="1"} 4\n'
        'b_total{running="8"} 2\nb_total{running="16"} 5e0\nbroken\n'
    )
    assert total(samples, "a") == 7
    assert total(samples, "b") == total(samples, "b_total") == 7
    assert total(samples, "c") is None
    assert by_label(samples, "b_total", "running") == {"8": 2.0, "16": 5.0}
