"""`vllm bench serve` and our own load generator against one `pipeline serve`: their figures side by side.

    python -P tests/bench/server/load_generators.py qwen3-8b --device cuda --m 1 32 64 --vllm "vllm" --out OUT

The model is a folder, or one of `random_qwen3.SHAPES`, made as in `verdict_gpu.py`: a large one on a GPU, for
a small one's tokens come faster than either client reads them. Both are closed loops of M clients with as
many requests of the same lengths; they take turns, each a few times, and the medians are compared. Bar: no
failed request, tokens per second and the time per token within 3% of one another. Exit status 1 otherwise.
"""

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from scalegate.base.atomic_files import write_json
from scalegate.serving_check.adapters import Endpoint, SubprocessEndpoint
from scalegate.serving_check.evidence.environment import describe_environment
from scalegate.serving_check.workload import WorkloadSpec
from scalegate.serving_check.workload.generator import run_workload
from scalegate.tests.bench.gate.verdict_gpu import make_checkpoint
from scalegate.tests.bench.random_qwen3 import SHAPES

RESULT = Path(__file__).parents[1] / "results" / "server" / "load_generators.json"
PROMPT, OUTPUT = 128, 128
WAVES = 4
"""Requests of a client."""
LEAST_REQUESTS = 8
APART = 0.03
BOUND = ("output_throughput", "tpot_ms")
TOKENIZER_VOCABULARY = 1024
WARMUP_SEED = 1 << 32
"""Added to a seed for prompts that are not measured."""
NAME = "served"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", help="a folder, or a shape")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"), help="where a shape's weights lie")
    parser.add_argument("--vllm", default="vllm", help="vLLM's command, as a shell would read it")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--m", type=int, nargs="+", default=[1, 32, 64])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as work:
        checkpoint = Path(options.checkpoint).resolve()
        if options.checkpoint in SHAPES:
            checkpoint = Path(work) / "checkpoint"
            make_checkpoint(options.checkpoint, checkpoint, options.device)
        rows = compared(checkpoint, Path(work), options)
    sys.exit(not all(row["passed"] for row in rows))


def compared(checkpoint: Path, folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    command = [sys.executable, "-P", "-m", "scalegate.pipeline", "serve", str(checkpoint), "--port", "0"]
    command += ["--served-model-name", NAME, "--max-num-seqs", str(max(options.m))]
    command += ["--device", options.device, "--max-model-len", str(2 * (PROMPT + OUTPUT))]
    environment = vars(describe_environment(options.device, "auto", "embedded", "embedded"))
    rows: list[dict[str, Any]] = []
    with SubprocessEndpoint(command, "pipeline serve", log=folder / "server.txt") as endpoint:
        for m in options.m:
            rows.append(row(endpoint, checkpoint, shlex.split(options.vllm), m, options.rounds, folder))
            told = {
                "environment": environment,
                "model": Path(options.checkpoint).name,
                "lengths": [PROMPT, OUTPUT],
            }
            write_json(options.out, told | {"rows": rows})
    return rows


def row(
    endpoint: Endpoint, checkpoint: Path, vllm: Sequence[str], m: int, rounds: int, folder: Path
) -> dict[str, Any]:
    requests = max(LEAST_REQUESTS, WAVES * m)
    figures: dict[str, list[dict[str, float]]] = {"ours": [], "vllm": []}
    measure = {
        "ours": lambda seed: by_ours(endpoint, m, requests, seed),
        "vllm": lambda seed: by_vllm(endpoint, checkpoint, vllm, m, requests, seed, folder),
    }
    by_ours(endpoint, m, requests, rounds)  # the server meets this M for the first time
    for seed in range(rounds):
        for name in sorted(measure, reverse=seed % 2 == 1):
            figures[name].append(measure[name](seed))
    medians = {name: medians_of(each) for name, each in figures.items()}
    apart = {
        name: round(medians["ours"][name] / medians["vllm"][name] - 1, 4)
        for name in medians["ours"]
        if medians["vllm"][name]
    }
    failed = sum(run["failed"] for each in figures.values() for run in each)
    passed = not failed and all(abs(apart[name]) <= APART for name in BOUND)
    said = "ok" if passed else "MISS"
    print(
        f"{said:>4} M={m}: ours {medians['ours']}, vllm bench serve {medians['vllm']}, apart {apart}, "
        f"{failed} failed",
        flush=True,
    )
    return {
        "m": m,
        "requests": requests,
        "rounds": figures,
        "apart": apart,
        "failed": failed,
        "passed": passed,
    }


def medians_of(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: round(median(turn[name] for turn in rounds), 3) for name in rounds[0]}


def by_ours(endpoint: Endpoint, m: int, requests: int, seed: int) -> dict[str, float]:
    spec = WorkloadSpec(m, requests, PROMPT, OUTPUT, seed=seed, vocab_size=TOKENIZER_VOCABULARY)
    run_workload(endpoint, replace(spec, num_requests=1, seed=seed + WARMUP_SEED))
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
    command = [*vllm, "bench", "serve", "--base-url", endpoint.base_url, "--model", NAME]
    command += ["--tokenizer", str(checkpoint), "--num-prompts", str(requests), "--max-concurrency", str(m)]
    command += ["--random-input-len", str(PROMPT), "--random-output-len", str(OUTPUT), "--ignore-eos"]
    # Left out, it is the server's default, and what is asked of the server would differ.
    command += ["--temperature", str(WorkloadSpec.temperature)]
    command += ["--num-warmups", "1", "--seed", str(seed), "--save-result", "--result-dir", str(folder)]
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
