"""A toy engine, wholly in this file: a plugin that `pipeline validate --engine toy` drives like any other.

Its server is ours behind another command line and a proxy that gives every figure another name. Run as a
script, this file is that proxy: `test_toy_engine.py CHECKPOINT PLACES LOG`.
"""

import http.server
import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from scalegate.serving_check.adapters import SubprocessEndpoint, Telemetry
from scalegate.serving_check.adapters.engine import ENGINES, Availability, CardCommand, Engine, ServerJob
from scalegate.serving_check.adapters.ready_line import ready_line
from scalegate.serving_check.adapters.series import Series
from scalegate.tests.forked_command import run_pipeline

pytestmark = pytest.mark.long

RENAMED = {
    "vllm:num_requests_running": "toy_active",
    "vllm:num_requests_waiting": "toy_queued",
    "vllm:kv_cache_usage_perc": "toy_memory_used",
    "vllm:num_preemptions_total": "toy_evictions_total",
    "scalegate:engine_steps_total": "toy_iterations_total",
    "scalegate:compilations_total": "toy_jit_total",
}
"""What of our server's figures the toy tells, and how it calls them."""


def toy_server(job: ServerJob) -> SubprocessEndpoint:
    inner_log = job.log.with_suffix(".inner")
    command = [sys.executable, "-P", __file__, str(job.folder), str(job.options.max_num_seqs), str(inner_log)]
    return SubprocessEndpoint(
        command, f"toy {job.side}", log=job.log, telemetry=Telemetry(TOY.series), progress=job.progress
    )


TOY = Engine(
    name="toy",
    title="the toy engine",
    server=toy_server,
    availability=lambda: Availability(True, "wound up and ready"),
    series=Series(
        running="toy_active",
        waiting="toy_queued",
        kv_cache_usage="toy_memory_used",
        preemptions="toy_evictions_total",
        steps_by_running="toy_iterations_total",
        compilations="toy_jit_total",
    ),
    options=frozenset({"max_num_seqs"}),
    card_command=lambda model, method: CardCommand("Toy", "sh", f"toy run {model}"),
)
if __name__ == "scalegate_plugin_test_toy_engine":
    ENGINES.add(TOY.name, TOY)


def pipeline(*words: object, plugin: bool = True) -> subprocess.CompletedProcess:
    environment = {**os.environ, "SCALEGATE_PLUGINS": __file__ if plugin else ""}
    return run_pipeline(*words, environment=environment)


@pytest.fixture(scope="module")
def verdict(example_checkpoint: Path) -> dict:
    words = [example_checkpoint, "--baseline", example_checkpoint, "--engine", "toy", "--m", "2", "--json"]
    words += [
        "--input-len",
        16,
        "--output-len",
        8,
        "--quality-tokens",
        1024,
        "--floor",
        0.05,
        "--max-blocks",
        60,
    ]
    result = pipeline("validate", *words, "--device", "cpu")
    assert result.returncode in (0, 1, 2) and result.stdout, result.stderr
    return json.loads(result.stdout)


def check(verdict: dict, name: str) -> dict:
    return next(check for check in verdict["checks"] if check["name"] == name)


@pytest.mark.alone
@pytest.mark.exhaustive
def test_it_is_driven_and_judged(verdict: dict):
    assert (verdict["environment"]["engine"], verdict["environment"]["baseline_engine"]) == ("toy", "toy")
    assert verdict["curve"][0]["artifact"]["requests"] > 0
    for name in ("canary text", "no failed requests", "M reached", "throughput"):
        assert check(verdict, name)["status"] == "pass", check(verdict, name)["reason"]


@pytest.mark.alone
@pytest.mark.exhaustive
def test_its_figures_are_read_under_its_own_names(verdict: dict):
    side = verdict["curve"][0]["artifact"]
    assert side["running_mean"] == pytest.approx(2, abs=0.5) and side["preemptions"] == 0
    assert check(verdict, "compilations in traffic")["status"] == "pass"
    assert check(verdict, "KV capacity")["measured"].startswith("capacity not reported")
    assert side["step_ms"] is None, "the toy does not tell how long a step takes"


@pytest.mark.alone
@pytest.mark.exhaustive
def test_what_is_not_ours_is_not_claimed_of_it(verdict: dict):
    assert verdict["artifact"]["layouts"] == {} and verdict["artifact"]["kv_cache_dtype"] is None
    assert verdict["environment"]["engine_options"] == {"max_num_seqs": 2}
    assert "--engine toy" in verdict["command"] and "--page-size" not in verdict["command"]


def test_an_option_that_it_has_not_is_refused(example_checkpoint: Path):
    words = [example_checkpoint, "--baseline", example_checkpoint, "--engine", "toy", "--page-size", 16]
    result = pipeline("validate", *words)
    assert result.returncode == 2 and "--page-size does not apply to the engine 'toy'" in result.stderr


def test_doctor_and_help_know_it():
    assert "embedded, URL, toy;" in pipeline("doctor").stdout
    assert "toy        yes: wound up and ready" in pipeline("doctor", "--verbose").stdout
    assert "[embedded|vllm|sglang|URL|toy]" in " ".join(pipeline("validate", "--help").stdout.split())


def test_without_its_registration_nobody_knows_it(example_checkpoint: Path):
    words = [example_checkpoint, "--baseline", example_checkpoint, "--engine", "toy"]
    result = pipeline("validate", *words, plugin=False)
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert "unknown engine 'toy'; choose one of: embedded, vllm, sglang, URL" in result.stderr
    assert "toy" not in pipeline("doctor", plugin=False).stdout


class Proxy(http.server.BaseHTTPRequestHandler):
    """Passes everything on to `upstream`, its metrics under the toy's names."""

    upstream = ""

    def do_GET(self) -> None:
        self._pass_on(None)

    def do_POST(self) -> None:
        self._pass_on(self.rfile.read(int(self.headers["Content-Length"])))

    def _pass_on(self, body: bytes | None) -> None:
        request = urllib.request.Request(
            self.upstream + self.path, body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as answer:
            self.send_response(answer.status)
            self.send_header("Content-Type", answer.headers["Content-Type"])
            self.end_headers()
            if self.path == "/metrics":
                self.wfile.write(renamed(answer.read().decode()).encode())
            while chunk := answer.read1():
                self.wfile.write(chunk)
                self.wfile.flush()

    def log_message(self, format: str, *arguments: object) -> None:
        """Say nothing of each request."""


def renamed(text: str) -> str:
    told = [line for line in text.splitlines() if line.partition("{")[0] in RENAMED]
    for ours, theirs in RENAMED.items():
        told = [line.replace(ours, theirs) for line in told]
    return "\n".join(told) + "\n"


class Server(http.server.ThreadingHTTPServer):
    request_queue_size = 64


def main(checkpoint: str, places: str, log: str) -> None:
    command = [sys.executable, "-P", "-m", "scalegate.pipeline", "serve", checkpoint, "--port", "0"]
    command += ["--device", "cpu", "--max-num-seqs", places, "--max-model-len", "128"]
    with SubprocessEndpoint(command, "toy", log=Path(log), progress=False) as endpoint:
        Proxy.upstream = endpoint.base_url
        with Server(("127.0.0.1", 0), Proxy) as server:
            print(ready_line("toy", f"http://127.0.0.1:{server.server_port}"), flush=True)
            server.serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
