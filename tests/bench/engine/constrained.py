"""Bar 7: 500 requests, 64 at once, with penalties, biases and JSON schemas, from one `pipeline serve`.

Greedy tokens must be the best by transformers' own processors, each request computed alone; every answer to a
schema must satisfy it by `jsonschema` (`pip install jsonschema`).

    python -P tests/bench/engine/constrained.py examples/qwen3-pycode-5m
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

import aiohttp
import jsonschema
import torch
from scalegate.base.atomic_files import write_json
from scalegate.serving_check.adapters import SubprocessEndpoint
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor, LogitsProcessorList
from transformers.generation.logits_process import (
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

RESULTS = Path(__file__).parents[1] / "results" / "engine" / "constrained.json"
REQUESTS, CONCURRENCY, OUTPUT = 500, 64, 24
ADJUSTED: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.8},
    {"presence_penalty": 1.2, "frequency_penalty": 0.4},
    {"frequency_penalty": -0.6},
    {"logit_bias": {"11": 4.0, "42": -100, "300": 2.5}},
    {"repetition_penalty": 1.1, "presence_penalty": 0.5, "logit_bias": {"7": 3.0}},
]
COUNT = {"type": "integer", "maximum": 999, "minimum": 0}
SCHEMAS: list[dict[str, Any]] = [
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 10},
            "size": {"enum": ["small", "large"]},
            "counts": {
                "type": "array",
                "items": {"type": "integer", "maximum": 999, "minimum": 0},
                "maxItems": 3,
            },
        },
        "required": ["name", "size", "counts"],
        "additionalProperties": False,
    },
    {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 6},
    {
        "type": "object",
        "properties": {
            "kind": {"const": "point"},
            "at": {
                "type": "object",
                "properties": {"x": {"type": "integer", "minimum": -9, "maximum": 9}, "y": {"type": "null"}},
                "required": ["x", "y"],
                "additionalProperties": False,
            },
        },
        "required": ["kind", "at"],
        "additionalProperties": False,
    },
    {"type": "string", "pattern": "^[a-f]{3}-[0-9]{2}$"},
]


class OpenAIPenalties(LogitsProcessor):
    """OpenAI's formula, which transformers does not have."""

    def __init__(self, prompt: int, presence: float, frequency: float):
        self.prompt, self.presence, self.frequency = prompt, presence, frequency

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        counts = torch.bincount(input_ids[0, self.prompt :], minlength=scores.shape[1])
        return scores - self.frequency * counts - self.presence * (counts > 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.checkpoint)
    bodies = [body_of(index, tokenizer) for index in range(REQUESTS)]
    serve = [
        sys.executable,
        "-P",
        "-m",
        "scalegate.pipeline",
        "serve",
        str(options.checkpoint),
        "--port",
        "0",
    ]
    serve += ["--dtype", "float32", "--max-num-seqs", str(CONCURRENCY), "--max-model-len", "512"]
    with (
        tempfile.TemporaryDirectory() as folder,
        SubprocessEndpoint(serve, str(options.checkpoint), log=Path(folder) / "log.txt") as endpoint,
    ):
        answers = asyncio.run(ask_all(endpoint.base_url, bodies))
    model = AutoModelForCausalLM.from_pretrained(options.checkpoint, dtype=torch.float32)
    counted: Counter[str] = Counter()
    for body, choice in zip(bodies, answers, strict=True):
        if "response_format" in body:
            counted["schemas"] += 1
            counted["valid"] += is_valid(choice, body["response_format"]["json_schema"]["schema"])
        else:
            counted["adjusted"] += 1
            counted["equal"] += are_greedy(model, body, choice["token_ids"])
    passed = counted["valid"] == counted["schemas"] and counted["equal"] == counted["adjusted"]
    versions = {name: version(name) for name in ("transformers", "jsonschema", "llguidance", "torch")}
    report = {
        "requests": REQUESTS,
        "concurrency": CONCURRENCY,
        **counted,
        "passed": passed,
        "versions": versions,
    }
    write_json(options.out, report)
    print(report)
    sys.exit(not passed)


def body_of(index: int, tokenizer: Any) -> dict[str, Any]:
    """Every other one adjusted and greedy, or of a schema and hot."""
    text = f"def task_{index}(value):\n" + "    value += 1\n" * (index % 7)
    body: dict[str, Any] = {"prompt": tokenizer.encode(text), "return_token_ids": True}
    if index % 2:
        schema = {"name": "answer", "schema": SCHEMAS[index // 2 % len(SCHEMAS)]}
        response_format = {"type": "json_schema", "json_schema": schema}
        return {
            **body,
            "response_format": response_format,
            "max_tokens": 150,
            "temperature": 1.3,
            "seed": index,
        }
    adjusted = ADJUSTED[index // 2 % len(ADJUSTED)]
    return {**body, **adjusted, "max_tokens": OUTPUT, "temperature": 0, "ignore_eos": True}


async def ask_all(base_url: str, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    gate = asyncio.Semaphore(CONCURRENCY)
    order = list(range(len(bodies)))
    random.Random(0).shuffle(order)
    answers: dict[int, dict[str, Any]] = {}

    async def ask(session: aiohttp.ClientSession, index: int) -> None:
        async with gate, session.post(f"{base_url}/v1/completions", json=bodies[index]) as response:
            body = await response.json()
            if response.status != 200:
                raise SystemExit(f"{response.status}: {body}")
            answers[index] = body["choices"][0]

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:
        await asyncio.gather(*(ask(session, index) for index in order))
    return [answers[index] for index in range(len(bodies))]


def are_greedy(model: Any, body: dict[str, Any], tokens: list[int]) -> bool:
    """Whether each token is the best after those before it, by processors in `generate`'s order."""
    prompt = body["prompt"]
    asked = [body.get(f"{kind}_penalty", 0) for kind in ("presence", "frequency")]
    bias = {(int(token),): float(value) for token, value in body.get("logit_bias", {}).items()}
    processors = LogitsProcessorList([SequenceBiasLogitsProcessor(bias)] if bias else [])
    processors.append(RepetitionPenaltyLogitsProcessor(body.get("repetition_penalty", 1.0)))
    processors.append(OpenAIPenalties(len(prompt), *asked))
    ids = torch.tensor([[*prompt, *tokens]])
    with torch.no_grad():
        logits = model(ids).logits[0].float()
    for at in range(len(prompt), ids.shape[1]):
        scores = processors(ids[:, :at], logits[at - 1 : at])
        if int(scores.argmax()) != int(ids[0, at]):
            return False
    return len(tokens) == OUTPUT


def is_valid(choice: dict[str, Any], schema: dict[str, Any]) -> bool:
    try:
        jsonschema.validate(json.loads(choice["text"]), schema)
    except (ValueError, jsonschema.ValidationError) as error:
        print(repr(choice["text"]), choice["finish_reason"], str(error)[:200])
        return False
    return choice["finish_reason"] == "stop"


if __name__ == "__main__":
    main()
