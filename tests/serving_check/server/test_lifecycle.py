"""Beginning and end of the server and of its requests: keys, ports, disconnects, drains, deaths, orphans."""

import contextlib
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from scalegate.base.errors import UserError
from scalegate.pipeline.commands.serve import serve
from scalegate.serving_check.adapters import Endpoint, SubprocessEndpoint
from scalegate.serving_check.adapters.prometheus_text import parse_metrics, total
from scalegate.serving_check.adapters.ready_line import find_base_url
from scalegate.serving_check.server.run import bind

COUNTING_SERVER = Path(__file__).parents[1] / "counting_server.py"


def wait_until(condition):
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.02)


def counting_command(step_seconds: float, *key: str) -> list[str]:
    return [sys.executable, "-P", str(COUNTING_SERVER), str(step_seconds), *key]


@contextlib.contextmanager
def counting_server(folder: Path) -> Iterator[Endpoint]:
    """A server over an engine without a model, one token in 10 ms."""
    command = counting_command(0.01, "secret")
    server = SubprocessEndpoint(command, "counting", log=folder / "log.txt")
    server.api_key = "secret"
    with server as endpoint:
        yield endpoint


@pytest.fixture(scope="module")
def counting(tmp_path_factory: pytest.TempPathFactory):
    with counting_server(tmp_path_factory.mktemp("counting")) as endpoint:
        yield endpoint


@pytest.fixture
def dying(tmp_path):
    """One that a test may kill."""
    with counting_server(tmp_path) as endpoint:
        yield endpoint


def listening_process(base_url: str) -> psutil.Process:
    port = int(base_url.rpartition(":")[2])
    connections = psutil.net_connections("tcp")
    return psutil.Process(next(c.pid for c in connections if c.laddr.port == port and c.status == "LISTEN"))


def engine_process(server: psutil.Process) -> psutil.Process:
    """Of the server's children, the one that runs the engine."""
    return next(child for child in server.children() if "spawn_main" in " ".join(child.cmdline()))


def running(client: httpx.Client) -> tuple[float, float]:
    """Requests running, and the share of KV pages in use."""
    samples = parse_metrics(client.get("/metrics").text)
    requests, usage = total(samples, "vllm:num_requests_running"), total(samples, "vllm:kv_cache_usage_perc")
    assert requests is not None and usage is not None
    return requests, usage


def refuses_connections(base_url: str) -> bool:
    try:
        httpx.get(base_url + "/health")
    except httpx.ConnectError:
        return True
    except httpx.TransportError:
        pass
    return False


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_pages(server, stream):
    body = {"prompt": "x", "max_tokens": 480, "ignore_eos": True, "n": 8, "stream": stream}
    with httpx.Client(base_url=server.base_url) as client:
        wait_until(lambda: running(client) == (0, 0))
        address = server.base_url.removeprefix("http://").split(":")
        with socket.create_connection((address[0], int(address[1]))) as leaving:
            request = httpx.Request("POST", server.base_url + "/v1/completions", json=body)
            length = len(request.content)
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n"
            leaving.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + request.content)
            wait_until(lambda: running(client)[0] == 8)
            assert running(client)[1] > 0
        wait_until(lambda: running(client) == (0, 0))
        assert 'finished_reason="abort"' in client.get("/metrics").text


def test_the_process_that_answers_has_no_torch_in_memory(server):
    def has_torch(process: psutil.Process) -> bool:
        return any("libtorch" in mapping.path for mapping in process.memory_maps())

    api = listening_process(server.base_url)
    assert has_torch(psutil.Process()) and not has_torch(api)


def test_a_wrong_key_is_refused_and_health_needs_none(counting):
    with httpx.Client(base_url=counting.base_url) as client:
        body = {"prompt": [1]}
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            response = client.post("/v1/completions", json=body, headers=headers)
            assert response.status_code == 401
            assert response.json()["error"]["code"] == "invalid_api_key"
            assert client.get("/v1/models", headers=headers).status_code == 401
        assert client.get("/health").status_code == 200
        assert client.post("/v1/completions", json=body, headers=counting.headers()).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
def test_what_the_engine_refuses_is_the_clients_error(counting, stream):
    body = {"prompt": [666], "stream": stream}
    response = httpx.post(counting.base_url + "/v1/completions", json=body, headers=counting.headers())
    assert response.status_code == 400
    assert response.json()["error"]["message"] == "this engine never takes that prompt"


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_an_idle_server_ends_with_the_status_of_its_signal(tmp_path, number, status):
    log = tmp_path / "log.txt"
    with open(log, "wb") as file:
        process = subprocess.Popen(counting_command(0.01), stdout=file, stderr=file)
    wait_until(lambda: find_base_url(log) is not None)
    process.send_signal(number)
    assert process.wait(60) == status


def test_sigterm_finishes_what_runs_and_ends_cleanly(tmp_path):
    log = tmp_path / "log.txt"
    with open(log, "wb") as file:
        process = subprocess.Popen(counting_command(0.01), stdout=file, stderr=file)
    wait_until(lambda: find_base_url(log) is not None)
    base_url = find_base_url(log) or ""
    answers = []

    def ask() -> None:
        body = {"prompt": [1], "max_tokens": 200}
        answers.append(httpx.post(base_url + "/v1/completions", json=body, timeout=60))

    asking = threading.Thread(target=ask)
    asking.start()
    with httpx.Client(base_url=base_url) as client:
        wait_until(lambda: running(client)[0] == 1)
    process.send_signal(signal.SIGTERM)
    wait_until(lambda: refuses_connections(base_url))
    assert not answers, "it takes no new client while it finishes"
    assert process.wait(60) == 0
    asking.join()
    assert answers[0].json()["usage"]["completion_tokens"] == 200
    assert "Traceback" not in log.read_text()


@pytest.mark.parametrize("death", ["killed", "exception"])
def test_a_dead_engine_fails_every_request_and_says_so(dying, death):
    outcomes = []
    url, headers = dying.base_url + "/v1/completions", dying.headers()

    def ask(stream: bool) -> None:
        body = {"prompt": [1], "max_tokens": 4000, "n": 2, "stream": stream}
        response = httpx.post(url, json=body, headers=headers, timeout=60)
        outcomes.append((stream, response.status_code, response.text))

    threads = [threading.Thread(target=ask, args=(stream,)) for stream in (True, False)]
    for thread in threads:
        thread.start()
    with httpx.Client(base_url=dying.base_url, headers=headers) as client:
        wait_until(lambda: running(client)[0] == 4)
        if death == "killed":
            engine_process(listening_process(dying.base_url)).kill()
        else:
            assert client.post("/v1/completions", json={"prompt": [667]}).status_code == 503
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        for stream, status, text in outcomes:
            assert status == (200 if stream else 503)
            assert "the engine has died" in text
        assert len(outcomes) == 2


@pytest.mark.parametrize("death", ["killed", "exception"])
def test_a_server_whose_engine_has_died_ends_with_a_status_that_a_supervisor_restarts(tmp_path, death):
    log = tmp_path / "log.txt"
    with open(log, "wb") as file:
        process = subprocess.Popen(counting_command(0.01), stdout=file, stderr=file)
    try:
        wait_until(lambda: find_base_url(log) is not None)
        base_url = find_base_url(log) or ""
        if death == "killed":
            engine_process(psutil.Process(process.pid)).kill()
        else:
            body = {"prompt": [667]}
            assert httpx.post(base_url + "/v1/completions", json=body, timeout=30).status_code == 503
        assert process.wait(60) not in (0, 1, None) or "EngineDied" in log.read_text()
        with pytest.raises(httpx.ConnectError):
            httpx.get(base_url + "/health")
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_that_breaks_a_step_is_failed_alone(counting, stream):
    url, headers = counting.base_url + "/v1/completions", counting.headers()
    answers = []

    def ask() -> None:
        answers.append(httpx.post(url, json={"prompt": [1], "max_tokens": 150}, headers=headers, timeout=60))

    asking = threading.Thread(target=ask)
    asking.start()
    with httpx.Client(headers=headers, timeout=30) as client:
        wait_until(lambda: running(httpx.Client(base_url=counting.base_url, headers=headers))[0] == 1)
        response = client.post(url, json={"prompt": [668], "stream": stream})
        assert response.status_code == 500
        assert response.json()["error"]["code"] == "engine_step_failed"
        assert client.get(counting.base_url + "/health").status_code == 200
    asking.join()
    assert answers[0].json()["usage"]["completion_tokens"] == 150


def test_the_engine_does_not_outlive_a_killed_server(dying):
    server = listening_process(dying.base_url)
    engine = engine_process(server)
    server.kill()
    wait_until(lambda: not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE)


def test_a_port_in_use_is_refused_before_the_model_is_loaded(example_checkpoint):
    before = signal.getsignal(signal.SIGTERM)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            UserError, match=f"cannot listen on 127.0.0.1 port {port}: Address already in use"
        ):
            serve(example_checkpoint, port=port)
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("host", "port", "message"),
    [
        ("no.such.host.invalid", 0, "is unknown"),
        ("192.0.2.1", 0, "cannot listen"),
        ("127.0.0.1", 70000, "no port 70000"),
    ],
)
def test_an_address_that_cannot_be_had(host, port, message):
    with pytest.raises(UserError, match=message):
        bind(host, port)


def test_a_checkpoint_that_cannot_be_served_ends_the_server_with_its_reason(example_checkpoint):
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(UserError, match=r"100000 .* 8192"):
        serve(example_checkpoint, port=0, device="cpu", max_model_len=100_000)
    assert signal.getsignal(signal.SIGTERM) is before
