"""Bar 11: the `openai` package and GuideLLM against `pipeline serve`, 64 requests at once, streamed.

GuideLLM runs from an environment of its own (`pip install guidellm`). Nothing is timed; what is checked is
that no request fails and that every count is exact: each request's usage against what was asked for and
against the tokenizer, and their sums against the server's own counters.

    python -P tests/bench/server/clients.py examples/qwen3-pycode-5m --guidellm ENV/bin/guidellm
"""

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import openai
from scalegate.base.atomic_files import write_json
from scalegate.serving_check.adapters import Endpoint, SubprocessEndpoint
from scalegate.serving_check.adapters.prometheus_text import total
from transformers import AutoTokenizer

RESULTS = Path(__file__).parents[1] / "results" / "server" / "clients.json"
CONCURRENCY = 64
REQUESTS = 128
PROMPT, OUTPUT = 48, 32
CHAT_TEMPLATE = (
    "{% for message in messages %}# {{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}# assistant: {% endif %}"
)


@dataclass
class Run:
    """What one client reported, and how the server's counters moved meanwhile."""

    client: str
    api: str
    requests: int
    errors: int
    inexact_requests: int
    """Requests whose usage differs from what was asked for or from the tokenizer's count."""
    prompt_tokens: int
    completion_tokens: int
    server_prompt_tokens: int
    server_completion_tokens: int

    @property
    def passed(self) -> bool:
        counts = (self.prompt_tokens, self.completion_tokens)
        exact = counts == (self.server_prompt_tokens, self.server_completion_tokens)
        return self.requests == REQUESTS and self.errors == self.inexact_requests == 0 and exact


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--guidellm", required=True, help="GuideLLM's executable")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs, guidellm_version = run_all(options.checkpoint, options.guidellm, Path(folder))
    report = {
        "concurrency": CONCURRENCY,
        "prompt_tokens": PROMPT,
        "output_tokens": OUTPUT,
        "versions": {"openai": version("openai"), "guidellm": guidellm_version},
        "runs": [{**asdict(run), "passed": run.passed} for run in runs],
        "passed": all(run.passed for run in runs),
    }
    write_json(options.out, report)
    print(f"{'client':10} {'api':22} {'requests':>8} {'errors':>6} {'inexact':>7} {'tokens out':>10}  passed")
    for run in runs:
        row = f"{run.client:10} {run.api:22} {run.requests:8} {run.errors:6} {run.inexact_requests:7}"
        print(f"{row} {run.completion_tokens:10}  {'yes' if run.passed else 'NO'}")
    sys.exit(not report["passed"])


def run_all(checkpoint: Path, guidellm: str, folder: Path) -> tuple[list[Run], str]:
    checkpoint = with_chat_template(checkpoint, folder / "checkpoint")
    command = [sys.executable, "-P", "-m", "scalegate.pipeline", "serve", str(checkpoint), "--port", "0"]
    command += [
        "--served-model-name",
        "served",
        "--max-num-seqs",
        str(CONCURRENCY),
        "--max-model-len",
        "1024",
    ]
    runs = []
    with SubprocessEndpoint(command, "pipeline serve", log=folder / "server.txt") as endpoint:
        for api in ("/v1/completions", "/v1/chat/completions"):
            runs.append(run_openai(endpoint, checkpoint, api))
            runs.append(run_guidellm(endpoint, checkpoint, api, guidellm, folder / "guidellm.json"))
    said = subprocess.run([guidellm, "--version"], capture_output=True, text=True, check=True).stdout
    return runs, said.split()[-1]


def with_chat_template(checkpoint: Path, to: Path) -> Path:
    shutil.copytree(checkpoint, to)
    path = to / "tokenizer_config.json"
    config = {**json.loads(path.read_text(encoding="utf-8")), "chat_template": CHAT_TEMPLATE}
    path.write_text(json.dumps(config), encoding="utf-8")
    return to


def server_counts(endpoint: Endpoint) -> tuple[int, int]:
    metrics = endpoint.metrics()
    prompt, output = (total(metrics, f"vllm:{kind}_tokens_total") or 0 for kind in ("prompt", "generation"))
    return int(prompt), int(output)


def counted(endpoint: Endpoint, client: str, api: str, before: tuple[int, int], seen: dict[str, int]) -> Run:
    after = server_counts(endpoint)
    server = {"server_prompt_tokens": after[0] - before[0], "server_completion_tokens": after[1] - before[1]}
    return Run(client, api, **seen, **server)


def run_openai(endpoint: Endpoint, checkpoint: Path, api: str) -> Run:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    chat = api == "/v1/chat/completions"
    prompts = [f"# {index}\ndef compute(value):\n" * (1 + index % 4) for index in range(REQUESTS)]
    seen = {"requests": 0, "errors": 0, "inexact_requests": 0, "prompt_tokens": 0, "completion_tokens": 0}
    before = server_counts(endpoint)

    async def ask(client: openai.AsyncOpenAI, prompt: str, gate: asyncio.Semaphore) -> None:
        body: dict[str, Any] = {"model": "served", "temperature": 0, "extra_body": {"ignore_eos": True}}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        sent = f"# user: {prompt}\n# assistant: " if chat else prompt
        usage = None
        async with gate:
            try:
                if chat:
                    messages = [{"role": "user", "content": prompt}]
                    stream = await client.chat.completions.create(
                        messages=messages, max_completion_tokens=OUTPUT, **body
                    )
                else:
                    stream = await client.completions.create(prompt=prompt, max_tokens=OUTPUT, **body)
                async for chunk in stream:
                    usage = chunk.usage or usage
            except openai.OpenAIError:
                seen["errors"] += 1
                return
        seen["requests"] += 1
        if usage is None:
            seen["inexact_requests"] += 1
            return
        expected = (len(tokenizer.encode(sent)), OUTPUT)
        seen["inexact_requests"] += (usage.prompt_tokens, usage.completion_tokens) != expected
        seen["prompt_tokens"] += usage.prompt_tokens
        seen["completion_tokens"] += usage.completion_tokens

    async def ask_all() -> None:
        gate = asyncio.Semaphore(CONCURRENCY)
        url = endpoint.base_url + "/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            await asyncio.gather(*(ask(client, prompt, gate) for prompt in prompts))

    asyncio.run(ask_all())
    return counted(endpoint, "openai", api, before, seen)


def run_guidellm(endpoint: Endpoint, checkpoint: Path, api: str, guidellm: str, out: Path) -> Run:
    before = server_counts(endpoint)
    backend = f"kind=openai_http,target={endpoint.base_url},model=served,request_format={api},http2=false"
    command = [guidellm, "run", "--disable-console", "--backend", backend]
    command += ["--profile", f"kind=concurrent,streams={CONCURRENCY}"]
    command += ["--constraint", f"kind=max_requests,count={REQUESTS}"]
    command += ["--data", f"kind=synthetic_text,prompt_tokens={PROMPT},output_tokens={OUTPUT}"]
    command += ["--tokenizer", f"kind=huggingface_auto,model={checkpoint}"]
    command += ["--output", f"kind=json,path={out}"]
    # One worker process holds 64 streams easily; its default of ten would crowd out the server.
    environment = {**os.environ, "GUIDELLM__MAX_WORKER_PROCESSES": "1"}
    subprocess.run(command, check=True, stdout=sys.stderr, env=environment)
    groups = json.loads(out.read_text(encoding="utf-8"))["benchmarks"][0]["requests"]
    done = groups["successful"]
    seen = {
        "requests": len(done),
        "errors": len(groups["errored"]) + len(groups["incomplete"]),
        "inexact_requests": sum(request["output_metrics"]["text_tokens"] != OUTPUT for request in done),
        "prompt_tokens": sum(request["input_metrics"]["text_tokens"] for request in done),
        "completion_tokens": sum(request["output_metrics"]["text_tokens"] for request in done),
    }
    return counted(endpoint, "guidellm", api, before, seen)


if __name__ == "__main__":
    main()
