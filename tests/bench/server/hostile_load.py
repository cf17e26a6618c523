"""What a server loses to hostile clients in a minute: memory, the time of `/health`, answers of eight others.

    python -P tests/bench/server/hostile_load.py --seconds 60 --out OUT/hostile_load.json

Against `pipeline serve` of the bundled checkpoint with its default limits: bodies of 200 MB, of known and of
unknown length; requests of 20,000 prompts; streams of long answers that nobody reads; a thousand connections
that send half a header and wait, opened anew when they are closed. They are sent from a process of their own.
Meanwhile eight clients stream one answer after another and count its tokens, and `/health` is asked twenty
times a second. Bars: the server's processes take at most 300 MB more than before, `/health` at most 200 ms,
and the eight lose nothing. Exit status 1 where one is missed, or where the server answered nobody with 413.
"""

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import platform
import resource
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import aiohttp
import psutil
from scalegate.base.atomic_files import write_json
from scalegate.serving_check.adapters import Endpoint, SubprocessEndpoint

EXAMPLE = Path(__file__).parents[3] / "examples" / "qwen3-pycode-5m"
RESULT = Path(__file__).parents[1] / "results" / "server" / "hostile_load.json"
BODY_BYTES, PROMPTS, HALF_OPEN, UNREAD = 200_000_000, 20_000, 1000, 16
BODIES_AT_ONCE = 2
CLIENTS, OUTPUT_TOKENS = 8, 48
MOST_GROWTH, MOST_HEALTH_S = 300_000_000, 0.2
PIECE = b" " * (1 << 20)
WARM_UP_S = 5.0
"""Before memory is read the first time: allocators and the tokenizer's process have what they need then."""


@dataclass
class Lost:
    """What the eight clients met."""

    answers: int = 0
    tokens: int = 0
    failures: list[str] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    command = [sys.executable, "-P", "-m", "scalegate.pipeline", "serve", str(EXAMPLE), "--port", "0"]
    command += ["--served-model-name", "served", "--device", "cpu", "--max-num-seqs", "32"]
    with (
        tempfile.TemporaryDirectory() as folder,
        SubprocessEndpoint(command, "pipeline serve", log=Path(folder) / "server.txt") as endpoint,
    ):
        report = asyncio.run(attacked(endpoint, options.seconds))
    write_json(options.out, {"python": platform.python_version(), "torch": version("torch"), **report})
    print(json.dumps(report, indent=1))
    sys.exit(not report["passed"])


async def attacked(endpoint: Endpoint, seconds: float) -> dict[str, object]:
    server = listening_process(endpoint)
    lost, health, most = Lost(), list[float](), 0
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await work_until(session, endpoint, time.monotonic() + WARM_UP_S, Lost())
        before = resident(server)
        ends = time.monotonic() + seconds
        context = multiprocessing.get_context("spawn")
        answers = context.Queue()
        attacker = context.Process(
            target=attack, args=(endpoint.base_url, endpoint.model, seconds, answers), daemon=True
        )
        attacker.start()
        work = asyncio.create_task(work_until(session, endpoint, ends, lost))
        while not work.done():
            started = time.monotonic()
            async with session.get(endpoint.base_url + "/health") as answer:
                lost.failures += [] if answer.status == 200 else [f"/health: {answer.status}"]
            health.append(time.monotonic() - started)
            most = max(most, resident(server))
            await asyncio.sleep(0.05)
        met = answers.get(timeout=120)
        attacker.join()
    health.sort()
    return {
        "seconds": seconds,
        "attackers_met": met,
        "resident_bytes_before": before,
        "resident_bytes_most": most,
        "growth_bytes": most - before,
        "health_seconds": {"median": health[len(health) // 2], "longest": health[-1]},
        "answers": lost.answers,
        "tokens": lost.tokens,
        "failures": lost.failures[:10],
        "passed": not lost.failures
        and lost.tokens == lost.answers * OUTPUT_TOKENS > 0
        and most - before <= MOST_GROWTH
        and health[-1] <= MOST_HEALTH_S
        and met.get("body: 413", 0) > 0,
    }


def listening_process(endpoint: Endpoint) -> psutil.Process:
    port = int(endpoint.base_url.rpartition(":")[2])
    found = (c.pid for c in psutil.net_connections("tcp") if c.laddr.port == port and c.status == "LISTEN")
    return psutil.Process(next(found))


def resident(server: psutil.Process) -> int:
    total = 0
    for process in (server, *server.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            total += process.memory_info().rss
    return total


async def work_until(session: aiohttp.ClientSession, endpoint: Endpoint, ends: float, lost: Lost) -> None:
    await asyncio.gather(*(work(session, endpoint, ends, lost, number) for number in range(CLIENTS)))


async def work(
    session: aiohttp.ClientSession, endpoint: Endpoint, ends: float, lost: Lost, number: int
) -> None:
    """One streamed answer after another; each must come whole."""
    body = {
        "model": endpoint.model,
        "prompt": f"def client_{number}(x):\n",
        "max_tokens": OUTPUT_TOKENS,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    while time.monotonic() < ends:
        try:
            async with session.post(endpoint.base_url + "/v1/completions", json=body) as answer:
                events = [line[6:].strip() async for line in answer.content if line.startswith(b"data: ")]
            if answer.status != 200 or events[-1] != b"[DONE]":
                raise ValueError(f"status {answer.status}, last {events[-1:]!r}")
            lost.tokens += json.loads(events[-2])["usage"]["completion_tokens"]
            lost.answers += 1
        except (aiohttp.ClientError, ValueError, LookupError, OSError) as error:
            lost.failures.append(f"{type(error).__name__}: {error}"[:300])


def attack(url: str, model: str, seconds: float, answers: "multiprocessing.Queue[Counter[str]]") -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 8 * HALF_OPEN)), hard))
    answers.put(asyncio.run(_attack(Endpoint(url, model), time.monotonic() + seconds)))


async def _attack(endpoint: Endpoint, ends: float) -> "Counter[str]":
    met: Counter[str] = Counter()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        tasks = [
            *(_large_bodies(session, endpoint, ends, met, known) for known in (True, False)),
            *(_large_bodies(session, endpoint, ends, met, known=False) for _ in range(BODIES_AT_ONCE - 1)),
            _many_prompts(session, endpoint, ends, met),
            *(_never_read(endpoint, ends, met) for _ in range(UNREAD)),
            *(_half_open(endpoint, ends, met) for _ in range(HALF_OPEN)),
        ]
        await asyncio.gather(*tasks)
    return met


async def _large_bodies(
    session: aiohttp.ClientSession, endpoint: Endpoint, ends: float, met: "Counter[str]", known: bool
) -> None:
    async def pieces():
        for _ in range(BODY_BYTES // len(PIECE)):
            yield PIECE

    headers = {"Content-Type": "application/json"} | ({"Content-Length": str(BODY_BYTES)} if known else {})
    while time.monotonic() < ends:
        try:
            url = endpoint.base_url + "/v1/completions"
            async with session.post(url, data=pieces(), headers=headers) as answer:
                met[f"body: {answer.status}"] += 1
        except (aiohttp.ClientError, OSError):
            # The server has answered and closed while the body was on its way.
            met["body: cut off"] += 1
        await asyncio.sleep(0.05)


async def _many_prompts(
    session: aiohttp.ClientSession, endpoint: Endpoint, ends: float, met: "Counter[str]"
) -> None:
    body = {"model": endpoint.model, "prompt": ["x"] * PROMPTS, "max_tokens": 1}
    while time.monotonic() < ends:
        async with session.post(endpoint.base_url + "/v1/completions", json=body) as answer:
            met[f"prompts: {answer.status}"] += 1
        await asyncio.sleep(0.05)


async def _never_read(endpoint: Endpoint, ends: float, met: "Counter[str]") -> None:
    body = {"model": endpoint.model, "prompt": "x", "max_tokens": 400, "ignore_eos": True, "stream": True}
    sent = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(sent)}\r\n"
    while time.monotonic() < ends:
        reader, writer = await _connect(endpoint)
        reader._limit = 1  # type: ignore[attr-defined]  # what comes stays in the socket
        writer.write(f"{head}Content-Type: application/json\r\n\r\n".encode() + sent)
        await asyncio.sleep(min(5.0, max(0.0, ends - time.monotonic())))
        writer.close()
        met["unread streams"] += 1


async def _half_open(endpoint: Endpoint, ends: float, met: "Counter[str]") -> None:
    while time.monotonic() < ends:
        with contextlib.suppress(OSError):
            reader, writer = await _connect(endpoint)
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost:")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(reader.read(), max(0.1, ends - time.monotonic()))
                met["half-open: closed by the server"] += 1
            writer.close()
        met["half-open"] += 1


async def _connect(endpoint: Endpoint) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = endpoint.base_url.removeprefix("http://").rpartition(":")
    return await asyncio.open_connection(host, int(port))


if __name__ == "__main__":
    main()
