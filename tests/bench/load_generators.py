"""`vllm bench serve` and our own load generator against one `pipeline serve`: their figures side by side.

    python -P tests/bench/load_generators.py CHECKPOINT --device cuda --m 1 32 64 --vllm "vllm" --out OUT

Both are closed loops of M clients with as many requests of the same lengths; they take turns, each a few
times, and the medians are compared. Bar: no failed request, tokens per second and the time per token within
3% of one another. Exit status 1 otherwise.
"""

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from scalegate.layouts.files import write_json
from scalegate.serving_check.engines import Endpoint, SubprocessEndpoint
from scalegate.serving_check.environment import describe_environment
from scalegate.serving_check.workload import WorkloadSpec
from scalegate.serving_check.workload.generator import run_workload

RESULT = Path(__file__).parent / "results" / "load_generators.json"
PROMPT, OUTPUT = 128, 128
WAVES = 4
"""Requests of a client."""
LEAST_REQUESTS = 8
APART = 0.03
BOUND = ("output_throughput", "tpot_ms")
TOKENIZER_VOCABULARY = 1024
NAME = "served"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--vllm", default="vllm", help="vLLM's command, as a shell would read it")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--m", type=int, nargs="+", default=[1, 32, 64])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    checkpoint = options.checkpoint.resolve()
    command = [sys.executable, "-P", "-m", "scalegate.pipeline", "serve", str(checkpoint), "--port", "0"]
    command += [
        "--served-model-name",
        NAME,
        "--max-num-seqs",
        str(max(options.m)),
        "--device",
        options.device,
    ]
    command += ["--max-model-len", str(2 * (PROMPT + OUTPUT))]
    with (
        tempfile.TemporaryDirectory() as folder,
        SubprocessEndpoint(command, "pipeline serve", log=Path(folder) / "server.txt") as endpoint,
    ):
        rows = [
            row(endpoint, checkpoint, shlex.split(options.vllm), m, options.rounds, Path(folder))
            for m in options.m
        ]
    environment = vars(describe_environment(options.device, "auto", "embedded", "embedded"))
    write_json(options.out, {"environment": environment, "lengths": [PROMPT, OUTPUT], "rows": rows})
    sys.exit(not all(one["passed"] for one in rows))


def row(
    endpoint: Endpoint, checkpoint: Path, vllm: Sequence[str], m: int, rounds: int, folder: Path
) -> dict[str, Any]:
    requests = max(LEAST_REQUESTS, WAVES * m)
    figures: dict[str, list[dict[str, float]]] = {"ours": [], "vllm": []}
    for seed in range(rounds):
        figures["ours"].append(by_ours(endpoint, m, requests, seed))
        figures["vllm"].append(by_vllm(endpoint, checkpoint, vllm, m, requests, seed, folder))
    medians = {name: medians_of(each) for name, each in figures.items()}
    apart = {
        name: round(medians["ours"][name] / medians["vllm"][name] - 1, 4)
        for name in medians["ours"]
        if medians["vllm"][name]
    }
    failed = sum(one["failed"] for each in figures.values() for one in each)
    passed = not failed and all(abs(apart[name]) <= APART for name in BOUND)
    print(f"M={m}: ours {medians['ours']}, vllm bench serve {medians['vllm']}, apart {apart}", flush=True)
    return {
        "m": m,
        "requests": requests,
        "rounds": figures,
        "apart": apart,
        "failed": failed,
        "passed": passed,
    }


def medians_of(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: round(median(one[name] for one in rounds), 3) for name in rounds[0]}


def by_ours(endpoint: Endpoint, m: int, requests: int, seed: int) -> dict[str, float]:
    spec = WorkloadSpec(
        m, requests, PROMPT, OUTPUT, num_warmups=1, seed=seed, vocab_size=TOKENIZER_VOCABULARY
    )
    result = run_workload(endpoint, spec)
    return {
        "output_throughput": result.output_throughput,
        "tpot_ms": 1000 * median(result.tpots),
        "ttft_ms": 1000 * median(result.ttfts),
        "failed": len(result.errors),
    }


def by_vllm(
    endpoint: Endpoint, checkpoint: Path, vllm: Sequence[str], m: int, requests: int, seed: int, folder: Path
) -> dict[str, float]:
    """It sends one request before it measures, too."""
    command = [*vllm, "bench", "serve", "--base-url", endpoint.base_url, "--model", NAME]
    command += ["--tokenizer", str(checkpoint), "--num-prompts", str(requests), "--max-concurrency", str(m)]
    command += ["--random-input-len", str(PROMPT), "--random-output-len", str(OUTPUT), "--ignore-eos"]
    command += ["--seed", str(seed), "--save-result", "--result-dir", str(folder)]
    subprocess.run([*command, "--result-filename", "vllm.json"], check=True, stdout=sys.stderr)
    told = json.loads((folder / "vllm.json").read_text(encoding="utf-8"))
    return {
        "output_throughput": told["output_throughput"],
        "tpot_ms": told["median_tpot_ms"],
        "ttft_ms": told["median_ttft_ms"],
        "failed": told["failed"] + requests - told["completed"],
    }


if __name__ == "__main__":
    main()
