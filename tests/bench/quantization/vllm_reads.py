"""Does vLLM read our compressed-tensors exports as we do, and serve them? On a GPU, with vLLM beside us.

    python -P tests/bench/quantization/vllm_reads.py --checkpoint examples/qwen3-pycode-5m \
        --text examples/heldout.jsonl \
        --out OUT/vllm_reads.json

Of each recipe's artifact: nats per token on the windows of `interchange.py`, ours on the GPU and vLLM's; then
`vllm serve` on it, sent completions at once. Exit status 1 where the two are further apart than the bound.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from scalegate.pipeline.commands.quantize import quantize
from scalegate.pipeline.model_loader.load_model import load_model
from scalegate.serving_check.adapters.external_command import LOOPBACK, free_port
from scalegate.serving_check.adapters.series import VLLM_SERIES
from scalegate.serving_check.adapters.subprocess_endpoint import SubprocessEndpoint, Telemetry
from scalegate.serving_check.workload import WorkloadSpec, run_workload
from scalegate.tests.bench.quantization.interchange import BOUND, TOOLS, nats_per_token, write_windows

SERVE = [sys.executable, "-P", "-m", "vllm.entrypoints.cli.main", "serve"]
SIZES = (
    "--max-model-len 1024 --max-num-seqs 16 --gpu-memory-utilization 0.05 --kv-cache-memory-bytes 1073741824"
)
REQUESTS = WorkloadSpec(m=8, num_requests=16, input_len=32, output_len=64)


def main() -> None:
    options = arguments()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2 * len(options.recipes)) as threads:
        windows, _ = write_windows(options.checkpoint, options.text, Path(folder))
        artifacts = {recipe: Path(folder) / Path(recipe).stem for recipe in options.recipes}
        for recipe, artifact in artifacts.items():
            quantize(options.checkpoint, recipe, out=artifact, progress=False)
        scores = {recipe: threads.submit(theirs, artifact, windows) for recipe, artifact in artifacts.items()}
        served = {recipe: threads.submit(served_by_vllm, artifact) for recipe, artifact in artifacts.items()}
        mine = {recipe: ours(artifact, windows) for recipe, artifact in artifacts.items()}
        unquantized = ours(options.checkpoint, windows)
        for recipe, score in scores.items():
            print(recipe, mine[recipe], score.result(), flush=True)
        rows = [
            row(artifact, mine[artifact], scores[artifact].result(), served[artifact].result())
            for artifact in artifacts
        ]
    results = {
        "checkpoint": options.checkpoint.name,
        "bound": BOUND,
        "unquantized": unquantized,
        "rows": rows,
    }
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(results, indent=1))
    sys.exit(not all(row["holds"] for row in rows))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument(
        "--recipes",
        nargs="+",
        default=["nvfp4", "int4-hqq", "int8", "tests/bench/quantization/int4_int8.yaml"],
    )
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def row(recipe: str, ours: dict[str, Any], theirs: dict[str, Any], served: dict[str, Any]) -> dict[str, Any]:
    difference = abs(ours["nats_per_token"] - theirs["nats_per_token"])
    holds = difference <= BOUND and not served["errors"]
    told = {"recipe": recipe, "ours": ours, "theirs": theirs, "difference": difference}
    return {**told, "served": served, "holds": holds}


def ours(folder: Path, windows: Path) -> dict[str, Any]:
    loaded = load_model(folder, device="cuda", progress=False)
    nats = nats_per_token(loaded.model, json.loads(windows.read_text(encoding="utf-8")))
    return {"nats_per_token": nats, "layouts": sorted(set(loaded.layouts.values()))}


def theirs(folder: Path, windows: Path) -> dict[str, Any]:
    command = [sys.executable, "-P", str(TOOLS / "score_vllm.py"), str(folder), str(windows)]
    # Its exit status says nothing: vLLM's threads may abort the process after its last line.
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    scores = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not scores:
        raise SystemExit(f"vLLM scored nothing (status {done.returncode}); its errors are above")
    return json.loads(scores[-1])


def served_by_vllm(folder: Path) -> dict[str, Any]:
    port = free_port()
    command = [*SERVE, str(folder), "--host", LOOPBACK, "--port", str(port), *SIZES.split()]
    url = f"http://{LOOPBACK}:{port}"
    log = folder.with_suffix(".log")
    server = SubprocessEndpoint(
        command,
        "vLLM",
        log=log,
        base_url=url,
        telemetry=Telemetry(VLLM_SERIES),
        startup_timeout=300,
        progress=False,
    )
    endpoint = server.start()
    try:
        result = run_workload(endpoint, REQUESTS)
    finally:
        server.stop()
    return {"requests": REQUESTS.num_requests, "tokens": result.output_tokens, "errors": list(result.errors)}


if __name__ == "__main__":
    main()
