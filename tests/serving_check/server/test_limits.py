"""What one client may cost a real server: sizes, slowness, connections, templates; others notice nothing."""

import asyncio
import concurrent.futures
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import uvicorn
from scalegate.base.errors import UserError
from scalegate.pipeline.cli.forked_servers import servers_forked
from scalegate.serving_check.adapters import SubprocessEndpoint
from scalegate.serving_check.adapters.ready_line import find_base_url
from scalegate.serving_check.server.connection import Connection
from scalegate.serving_check.server.fork_server import ADDRESS
from scalegate.serving_check.server.limits import ServerLimits
from scalegate.tests.exhaustive import exhaustive_but
from scalegate.tests.forked_command import run_pipeline
from uvicorn.server import ServerState

pytestmark = pytest.mark.long

BUSY = (psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP)
KEY = "not-to-be-seen-in-ps"
TEMPLATE = (
    "{% if messages[0].content == 'forever' %}{% for a in range(99999) %}{% for b in range(99999) %}"
    "{% for c in range(99999) %}{% endfor %}{% endfor %}{% endfor %}{% endif %}"
    "{% if messages[0].content == 'memory' %}{% set ns = namespace(x='x' * 1000000) %}"
    "{% for i in range(40) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{% endif %}"
    "{{ greeting }}{% for message in messages %}{{ message.content }}{% endfor %}"
)
OPTIONS = [
    "--dtype",
    "float32",
    "--max-model-len",
    "512",
    "--kv-cache-tokens",
    "16384",
    "--max-num-seqs",
    "8",
]
LIMITS = ["--max-body-mib", "1", "--max-prompts", "64", "--max-connections", "40"]
LIMITS += ["--header-seconds", "1", "--body-seconds", "2", "--text-seconds", "2", "--protect-all"]


@pytest.fixture(scope="module")
def checkpoint(example_checkpoint: Path, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / "hostile"
    shutil.copytree(example_checkpoint, folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**config, "chat_template": TEMPLATE}), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def limited(checkpoint, serve_command, tmp_path_factory):
    folder = tmp_path_factory.mktemp("limited")
    (folder / "key.txt").write_text(KEY + "\n")
    command = serve_command(checkpoint, *OPTIONS, *LIMITS, "--api-key-file", str(folder / "key.txt"))
    server = SubprocessEndpoint(command, "limited", log=folder / "log.txt")
    server.api_key = KEY
    with server as endpoint:
        yield endpoint


@pytest.fixture(scope="module")
def client(limited):
    with httpx.Client(base_url=limited.base_url, headers=limited.headers(), timeout=60) as client:
        yield client


def address(endpoint) -> tuple[str, int]:
    url = httpx.URL(endpoint.base_url)
    return url.host, url.port


def answer_to(connection: socket.socket, seconds: float = 60) -> bytes:
    """All that comes until the server closes."""
    connection.settimeout(seconds)
    received = b""
    with contextlib.suppress(ConnectionError):
        while more := connection.recv(1 << 16):
            received += more
    return received


def error_code(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


def assert_health_is_not_stalled(client: httpx.Client, work) -> None:
    """While `work` runs. A server that does it where it answers takes as long over /health as over the work;
    on a busy machine both take longer."""
    slowest, began = 0.0, time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        done = pool.submit(work)
        while not done.done():
            started = time.monotonic()
            assert client.get("/health").status_code == 200
            slowest = max(slowest, time.monotonic() - started)
            time.sleep(0.01)
        done.result()
    assert slowest < max(1.0, (time.monotonic() - began) / 3)


def load_of(processes: set[psutil.Process]) -> float:
    """Of a core, wanted by the busiest of them, over half a second; how much it gets is up to the others."""
    wanted: Counter[int] = Counter()
    for _ in range(25):
        wanted.update(process.pid for process in processes if process.status() in BUSY)
        time.sleep(0.02)
    return max(wanted.values(), default=0) / 25


def test_a_large_body_is_refused_by_its_length_alone(limited):
    with socket.create_connection(address(limited)) as connection:
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\n"
        connection.sendall(f"{head}Authorization: Bearer {KEY}\r\nContent-Length: 200000000\r\n\r\n".encode())
        answer = answer_to(connection)
    assert answer.startswith(b"HTTP/1.1 413 ") and b"request_too_large" in answer
    assert b"100 Continue" not in answer


def test_a_client_that_sends_a_large_body_sees_the_refusal(client):
    content = b"[" * (8 << 20)
    assert error_code(client.post("/v1/completions", content=content)) == (413, "request_too_large")


def test_a_large_body_of_unknown_length_is_refused_too(client):
    chunks = (b" " * 65536 for _ in range(64))
    assert error_code(client.post("/v1/completions", content=chunks)) == (413, "request_too_large")


def test_a_body_within_the_limit_is_answered(client):
    body = json.dumps({"prompt": "x", "max_tokens": 1}).encode()
    padded = body + b" " * ((1 << 20) - len(body))
    headers = {"Content-Type": "application/json"}
    assert client.post("/v1/completions", content=padded, headers=headers).status_code == 200
    assert client.post("/v1/completions", content=padded + b" ", headers=headers).status_code == 413


def test_the_key_is_checked_before_the_body_is_there(limited):
    with socket.create_connection(address(limited)) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n")
        connection.settimeout(60)
        assert connection.recv(100).startswith(b"HTTP/1.1 401 ")


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 500_000,
        b'{"prompt":' + b"[" * 100_000,
        b'{"prompt": ' + b"9" * 5000 + b"}",
        b"\xff\xfe",
        b"1e999",
    ],
)
def test_json_that_no_parser_can_take_is_the_clients_error(client, body):
    response = client.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 400


@pytest.mark.parametrize(
    "change",
    [{"prompt": ["x"] * 65}, {"prompt": [[1]] * 65}, {"prompt": ["x"] * 33, "n": 2}],
    ids=["texts", "tokens", "times n"],
)
def test_too_many_prompts_in_one_request_are_refused(client, change):
    response = client.post("/v1/completions", json={"max_tokens": 1, **change})
    assert error_code(response) == (413, "too_many_prompts")
    allowed = client.post("/v1/completions", json={"prompt": ["x"] * 64, "max_tokens": 1})
    assert len(allowed.json()["choices"]) == 64


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": ["some text"] * 20_000},
        {"prompt": [[1, 2]] * 20_000},
        {"prompt": "def f(x): return x\n" * 40_000},
        {"prompt": [1] + ["x"] * 200_000},
    ],
    ids=["20,000 texts", "20,000 token lists", "one long text", "many errors"],
)
def test_health_is_not_stalled_by_a_costly_request(client, body):
    def ask() -> None:
        assert client.post("/v1/completions", json=body).status_code in (400, 413)

    assert_health_is_not_stalled(client, ask)


def test_idle_and_slow_connections_are_closed(limited):
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n".encode()
    beginnings = {
        "silent": (b"", b""),
        "half a header": (head, b"HTTP/1.1 408 "),
        "half a body": (head + b"Content-Length: 100\r\n\r\n{", b"HTTP/1.1 408 "),
    }
    with contextlib.ExitStack() as stack:
        for name, (sent, expected) in beginnings.items():
            connection = stack.enter_context(socket.create_connection(address(limited)))
            connection.sendall(sent)
            answer = answer_to(connection)
            assert answer.startswith(expected) and bool(answer) == bool(expected), (name, answer)


def test_a_server_that_stood_still_does_not_blame_its_clients():
    """After SIGSTOP and SIGCONT epoll says nothing for once, and the timers run, with the request unread."""

    async def here(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"here"})

    async def answer_after_the_timer(request: bytes) -> bytes:
        config = uvicorn.Config(here, ws="none", lifespan="off")
        config.load()
        state: dict[str, Any] = {"server_state": ServerState(), "app_state": {}}
        ours, theirs = socket.socketpair()
        with theirs:
            _, connection = await asyncio.get_running_loop().connect_accepted_socket(
                lambda: Connection(ServerLimits(), config=config, **state), ours
            )
            theirs.sendall(request)
            connection._headers_are_late()
            return await asyncio.to_thread(answer_to, theirs)

    request = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    assert asyncio.run(answer_after_the_timer(request)).startswith(b"HTTP/1.1 200 ")
    assert asyncio.run(answer_after_the_timer(b"")) == b""
    assert asyncio.run(answer_after_the_timer(request[:20])).startswith(b"HTTP/1.1 408 ")


def test_headers_sent_byte_by_byte_do_not_hold_a_connection(limited):
    with socket.create_connection(address(limited)) as connection:
        connection.settimeout(0.1)
        deadline = time.monotonic() + 60
        answer = b""
        while not answer and time.monotonic() < deadline:
            with contextlib.suppress(TimeoutError, ConnectionError):
                connection.sendall(b"G")
                answer = connection.recv(100)
    assert answer.startswith((b"HTTP/1.1 408 ", b"HTTP/1.1 400 "))


def test_one_connection_too_many_is_refused_and_the_next_is_served_once_they_are_gone(limited):
    with contextlib.ExitStack() as stack:
        for _ in range(60):
            stack.enter_context(socket.create_connection(address(limited)))
        with socket.create_connection(address(limited)) as connection:
            assert answer_to(connection).startswith(b"HTTP/1.1 503 ")
    deadline = time.monotonic() + 60
    while (status := httpx.get(limited.base_url + "/health").status_code) == 503:
        assert time.monotonic() < deadline, "their places are not given back"
        time.sleep(0.1)
    assert status == 200


def test_a_client_that_never_reads_is_cut_off(tmp_path):
    script = str(Path(__file__).parents[1] / "counting_server.py")
    command = [sys.executable, "-P", script, "0", "--unread", "2"]
    with SubprocessEndpoint(command, "counting", log=tmp_path / "log.txt") as endpoint:
        body = json.dumps({"prompt": [1] * 2, "max_tokens": 4000, "n": 128, "stream": True}).encode()
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(address(endpoint))
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
            connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
            server = next(
                psutil.Process(each.pid)
                for each in psutil.net_connections("tcp")
                if each.laddr.port == address(endpoint)[1] and each.status == "LISTEN"
            )
            started = time.monotonic()

            def held() -> bool:
                return any(each.status == "ESTABLISHED" for each in server.net_connections("tcp"))

            while held() and time.monotonic() < started + 120:
                time.sleep(0.1)
            assert not held()
            assert time.monotonic() - started > 2


@pytest.mark.parametrize("name", ["chat_template", "tokenize", "tools", "messages", "raise_exception"])
def test_a_client_never_brings_a_template_or_changes_how_it_is_run(client, name):
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    value = "{% for i in range(99999) %}{% endfor %}"
    refused = client.post("/v1/chat/completions", json={**body, "chat_template_kwargs": {name: value}})
    assert refused.status_code == 400 and repr(name) in refused.json()["error"]["message"]
    variable = client.post("/v1/chat/completions", json={**body, "chat_template_kwargs": {"greeting": "hi "}})
    plain = client.post("/v1/chat/completions", json=body)
    assert variable.json()["usage"]["prompt_tokens"] > plain.json()["usage"]["prompt_tokens"]


@pytest.mark.parametrize("content", ["forever", "memory"])
def test_a_template_that_does_not_end_stalls_nobody_and_is_ended(client, limited, content):
    def ask() -> None:
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
        assert error_code(client.post("/v1/chat/completions", json=body)) == (400, "prompt_too_costly")

    assert_health_is_not_stalled(client, ask)
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    assert client.post("/v1/chat/completions", json=body).status_code == 200


@pytest.mark.exhaustive
@pytest.mark.parametrize("way", ["forked", "spawned"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_running_template_does_not_outlive_the_server(
    checkpoint, serve_command, tmp_path, monkeypatch, number, way
):
    monkeypatch.delenv(ADDRESS, raising=False)
    log = tmp_path / "log.txt"
    with contextlib.ExitStack() as forks:
        if way == "forked":  # from a fork server below this process, not from the one of all tests
            forks.enter_context(servers_forked("embedded", "auto"))
        command = serve_command(checkpoint, *OPTIONS, "--drain-seconds", "1", "--text-seconds", "600")
        assert_none_outlives(command, log, number)


def assert_none_outlives(command: list[str], log: Path, number: signal.Signals) -> None:
    others = set(psutil.Process().children(recursive=True))
    with open(log, "wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file)
    deadline = time.monotonic() + 240
    while find_base_url(log) is None and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    # A forked process is a child of the fork server, which is one of ours.
    children = set(psutil.Process().children(recursive=True)) - others - {psutil.Process(process.pid)}
    while load_of(children) > 0.2:
        assert time.monotonic() < deadline, "its processes are still loading"
    body = {"messages": [{"role": "user", "content": "forever"}]}
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        asked = pool.submit(httpx.post, f"{find_base_url(log)}/v1/chat/completions", json=body, timeout=60)
        while load_of(children) < 0.2:
            assert time.monotonic() < deadline, "the template is not being rendered"
        process.send_signal(number)
        assert process.wait(60) == (0 if number == signal.SIGTERM else -number)
        with contextlib.suppress(httpx.HTTPError):
            asked.result()
    assert len(children) >= 3
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not [child for child in alive if child.status() != psutil.STATUS_ZOMBIE]


def test_the_key_stands_in_no_command_line_and_guards_all_but_health(limited, client):
    for process in psutil.process_iter(["cmdline"]):
        assert KEY not in " ".join(process.info["cmdline"] or ())
    for path in ("/metrics", "/docs", "/openapi.json", "/version", "/v1/models", "/nothing"):
        assert httpx.get(limited.base_url + path).status_code == 401, path
        assert client.get(path).status_code == (404 if path == "/nothing" else 200), path
    assert httpx.get(limited.base_url + "/health").status_code == 200


def test_without_that_option_metrics_stay_open(server):
    assert httpx.get(server.base_url + "/metrics").status_code == 200


@pytest.mark.parametrize("content", exhaustive_but([b"", b"\n", b"\xff", b"x" * 5000], b"\xff"))
def test_a_file_with_no_key_is_refused(tmp_path, example_checkpoint, serve_command, content):
    (tmp_path / "key").write_bytes(content)
    command = serve_command(example_checkpoint, "--api-key-file", str(tmp_path / "key"))
    ended = subprocess.run(command, capture_output=True, timeout=60, check=False)
    assert ended.returncode == 2 and b"API key" in ended.stderr and b"Traceback" not in ended.stderr


def test_every_limit_and_the_keys_variable_are_in_the_help():
    environment = {**os.environ, "COLUMNS": "100"}
    text = run_pipeline("serve", "--help", environment=environment).stdout
    for name in ServerLimits.__dataclass_fields__:
        assert "--" + name.replace("_", "-") in text
    assert "SCALEGATE_API_KEY" in text and "--api-key-file" in text


def test_a_limit_that_is_none_is_refused():
    with pytest.raises(UserError, match="max_prompts is 0"):
        ServerLimits(max_prompts=0)
