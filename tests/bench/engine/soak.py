"""Requests that come when they like, of all lengths, some of which leave: nothing may be lost or compiled.

Poisson arrivals over HTTP, a pool small enough to preempt. Afterwards the greedy requests are sent again,
each alone, and must be answered alike. That is asked of float32: in bf16 products round otherwise at another
batch size, and where two tokens are nearly tied the answer may differ. Under --batch-invariance pin and
per-token it is asked of bf16 as well, and of the seeded requests.

    python -P tests/bench/engine/soak.py examples/qwen3-pycode-5m --device cuda
    python -P tests/bench/engine/soak.py examples/qwen3-pycode-5m --requests 40 --rate 1000 --max-prompt 48 \
        --max-output 80 --max-num-seqs 8 --kv-cache-tokens 256
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from scalegate.base.atomic_files import write_json
from scalegate.base.batch_invariance import INVARIANCE_MODES
from scalegate.serving_check.adapters import Endpoint, SubprocessEndpoint
from scalegate.serving_check.adapters.prometheus_text import total
from scalegate.serving_check.checks.compilations import compilations
from scalegate.serving_check.workload.engine_work import EngineWork, difference
from transformers import AutoTokenizer

TEXT = Path(__file__).parents[3] / "serving_check" / "data" / "heldout.jsonl"
TEXT_TOKENS = 100_000
SAMPLED_SHARE = 0.25
"""Of requests; the rest are greedy."""
SETTLE_SECONDS = 10.0


@dataclass(frozen=True)
class Plan:
    """One request: when it comes, what it asks, and when it leaves."""

    at: float
    prompt: list[int]
    output_len: int
    temperature: float
    seed: int
    leaves_after: int | None
    """Chunks after which the client closes the connection; 0 before the first; None stays."""

    def body(self, model: str) -> dict[str, Any]:
        return {
            "model": model,
            "prompt": self.prompt,
            "max_tokens": self.output_len,
            "temperature": self.temperature,
            "seed": self.seed,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


@dataclass
class Answer:
    """What its client got."""

    token_ids: list[int] = field(default_factory=list)
    usage: dict[str, int] = field(default_factory=dict)
    left: bool = False
    error: str | None = None


def main() -> None:
    options = arguments()
    plans = make_plans(options)
    with tempfile.TemporaryDirectory() as folder:
        server = SubprocessEndpoint(serve_command(options), "the server", log=Path(folder) / "log.txt")
        with server as endpoint:
            report = asyncio.run(soak(endpoint, plans, options))
    report = {"checkpoint": options.checkpoint.name, **settings(options), **report}
    for name, value in report.items():
        print(f"{name:24} {value}")
    if options.out is not None:
        write_json(options.out, report)
    sys.exit(not report["passed"])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--rate", type=float, default=40.0, help="arrivals per second")
    parser.add_argument("--max-prompt", type=int, default=4000)
    parser.add_argument("--min-output", type=int, default=1, help="near --max-output more are preempted")
    parser.add_argument("--max-output", type=int, default=512)
    parser.add_argument("--cancelled", type=float, default=0.05, help="share of requests whose client leaves")
    parser.add_argument("--max-num-seqs", type=int, default=128)
    parser.add_argument("--kv-cache-tokens", type=int, default=100_000)
    parser.add_argument("--kv-cache-dtype", default="unquantized")
    parser.add_argument("--batch-invariance", default="tuned", choices=INVARIANCE_MODES)
    parser.add_argument("--alone", type=int, help="requests to send again alone; default all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def settings(options: argparse.Namespace) -> dict[str, Any]:
    return {name: value for name, value in vars(options).items() if name not in ("checkpoint", "out")}


def serve_command(options: argparse.Namespace) -> list[str]:
    command = [sys.executable, "-P", "-m", "scalegate.pipeline", "serve", str(options.checkpoint)]
    command += ["--port", "0", "--served-model-name", "soak", "--jit-monitor", "warn"]
    command += ["--device", options.device, "--dtype", options.dtype]
    command += ["--max-num-seqs", str(options.max_num_seqs), "--kv-cache-dtype", options.kv_cache_dtype]
    command += ["--max-model-len", str(options.max_prompt + options.max_output)]
    command += ["--batch-invariance", options.batch_invariance]
    return [*command, "--kv-cache-tokens", str(options.kv_cache_tokens)]


def make_plans(options: argparse.Namespace) -> list[Plan]:
    """The same for the same seed. Prompts are slices of held-out text."""
    text = tokenize(options.checkpoint)
    generator = random.Random(options.seed)
    plans, at = [], 0.0
    for index in range(options.requests):
        at += generator.expovariate(options.rate)
        start = generator.randrange(len(text) - options.max_prompt)
        output_len = generator.randint(options.min_output, options.max_output)
        leaves = generator.random() < options.cancelled
        plans.append(
            Plan(
                at=at,
                prompt=text[start : start + generator.randint(1, options.max_prompt)],
                output_len=output_len,
                temperature=0.8 if generator.random() < SAMPLED_SHARE else 0.0,
                seed=index,
                leaves_after=generator.randrange(output_len) if leaves else None,
            )
        )
    return plans


def tokenize(checkpoint: Path) -> list[int]:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    tokens: list[int] = []
    with TEXT.open(encoding="utf-8") as lines:
        while len(tokens) < TEXT_TOKENS and (line := lines.readline()):
            tokens += tokenizer(json.loads(line)["text"])["input_ids"]
    return tokens


async def soak(endpoint: Endpoint, plans: Sequence[Plan], options: argparse.Namespace) -> dict[str, Any]:
    timeout = aiohttp.ClientTimeout(total=900)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        before, started = endpoint.metrics(), time.perf_counter()
        answers = await asyncio.gather(*(come(session, endpoint, plan, started) for plan in plans))
        seconds = time.perf_counter() - started
        after = await settled(endpoint)
        stayed = [(plan, answer) for plan, answer in zip(plans, answers, strict=True) if not answer.left]
        seeded_too = options.batch_invariance != "tuned"
        asked = [(plan, answer) for plan, answer in stayed if seeded_too or plan.temperature == 0.0]
        again = asked if options.alone is None else asked[:: -(-len(asked) // options.alone)]
        alone = [await differs(session, endpoint, plan, answer) for plan, answer in again]
        at_end = await settled(endpoint)
    differing = [found for found in alone if found is not None]
    errors = [answer.error for answer in answers if answer.error is not None]
    lost = sum(plan.output_len - len(answer.token_ids) for plan, answer in stayed)
    miscounted = sum(
        (answer.usage.get("prompt_tokens"), answer.usage.get("completion_tokens"))
        != (len(plan.prompt), plan.output_len)
        for plan, answer in stayed
    )
    compiled = compilations(at_end)
    work = EngineWork.between(before, after)
    report = {
        "seconds": round(seconds, 1),
        "output_tokens": sum(len(answer.token_ids) for answer in answers),
        "preemptions": int(difference(before, after, "vllm:num_preemptions_total") or 0),
        "left": sum(answer.left for answer in answers),
        "errors": len(errors),
        "first_errors": errors[:3],
        "lost_tokens": lost,
        "usage_miscounted": miscounted,
        "compilations": None if compiled is None else dict(compiled),
        "pool_used_at_end": total(at_end, "vllm:kv_cache_usage_perc"),
        "sent_again_alone": len(again),
        "differing_alone": differing,
        "step_ms": work.step_ms,
        "host_ms": work.host_ms,
        "device_idle_share": work.device_idle_share,
    }
    good = not errors and lost == miscounted == 0 and not differing and compiled == {}
    empty = report["pool_used_at_end"] == 0.0
    return {**report, "passed": good and empty and report["preemptions"] > 0 and report["left"] > 0}


async def come(session: aiohttp.ClientSession, endpoint: Endpoint, plan: Plan, started: float) -> Answer:
    await asyncio.sleep(max(0.0, started + plan.at - time.perf_counter()))
    return await ask(session, endpoint, plan.body(endpoint.model), plan.leaves_after)


async def ask(
    session: aiohttp.ClientSession, endpoint: Endpoint, body: dict[str, Any], leaves_after: int | None = None
) -> Answer:
    answer, chunks = Answer(), 0
    try:
        async with session.post(endpoint.base_url + "/v1/completions", json=body) as response:
            if response.status != 200:
                answer.error = f"HTTP {response.status}: {(await response.text())[:200]}"
                return answer
            async for line in response.content:
                if chunks == leaves_after:
                    answer.left = True
                    response.close()
                    return answer
                if line.startswith(b"data: {"):
                    event = json.loads(line.removeprefix(b"data: "))
                    if "error" in event:
                        answer.error = str(event["error"])
                        return answer
                    answer.usage = event.get("usage") or answer.usage
                    for choice in event["choices"]:
                        answer.token_ids += choice["token_ids"]
                        chunks += 1
    except (aiohttp.ClientError, TimeoutError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    return answer


async def differs(
    session: aiohttp.ClientSession, endpoint: Endpoint, plan: Plan, answer: Answer
) -> dict[str, Any] | None:
    """Where the request's answer alone is another, and by how much the two likeliest tokens differ there."""
    alone = await ask(session, endpoint, plan.body(endpoint.model))
    if alone.token_ids == answer.token_ids:
        return None
    pairs = zip(alone.token_ids, answer.token_ids, strict=False)
    same = next((index for index, (ours, theirs) in enumerate(pairs) if ours != theirs), 0)
    body = {"model": endpoint.model, "prompt": plan.prompt + alone.token_ids[:same], "max_tokens": 1}
    body |= {"temperature": 0, "logprobs": 2}
    async with session.post(endpoint.base_url + "/v1/completions", json=body) as response:
        top = (await response.json())["choices"][0]["logprobs"]["top_logprobs"][0]
    first, second = sorted(top.values(), reverse=True)[:2]
    return {"prompt": len(plan.prompt), "token": same, "gap_nats": first - second}


async def settled(endpoint: Endpoint) -> dict[str, float]:
    """`/metrics` once nothing runs or waits any more, or after a while in any case."""
    until = time.perf_counter() + SETTLE_SECONDS
    while True:
        samples = endpoint.metrics()
        left = total(samples, "vllm:num_requests_running"), total(samples, "vllm:num_requests_waiting")
        if left == (0, 0) or time.perf_counter() > until:
            return samples
        await asyncio.sleep(0.1)


if __name__ == "__main__":
    main()
