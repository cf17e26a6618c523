"""Bar 2: what is left of the offline API's throughput over HTTP, streamed to our own workload generator.

One engine, random weights: it is timed offline in the server's own process before the server opens. Prompts
and outputs are as long, each request asks for a full answer, and one token at a time is turned into text.

    python -P tests/bench/engine/streaming.py qwen3-8b
    python -P tests/bench/engine/streaming.py tiny --device cpu --n 1 16
"""

import argparse
import functools
import itertools
import json
import string
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

# Sets OpenMP's threads as it does for the commands, which has to come before torch.
import scalegate.pipeline  # noqa: F401
from scalegate.base.atomic_files import write_json
from scalegate.serving_check.adapters import Endpoint, SubprocessEndpoint
from scalegate.serving_check.engine.options import EngineOptions
from scalegate.serving_check.engine.request import SamplingParams
from scalegate.serving_check.server.model_description import ModelDescription
from scalegate.serving_check.server.run import ServerOptions, run_server
from scalegate.serving_check.workload import WorkloadResult, WorkloadSpec, percentile, run_workload
from scalegate.serving_check.workload.spec import MILLISECONDS
from scalegate.tests.bench.random_qwen3 import SHAPES, random_model, random_prompts

WORKLOADS = {"32/512": (32, 512), "512/128": (512, 128)}


def main() -> None:
    options = arguments()
    if options.serve is not None:
        serve(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        offline = Path(folder) / "offline.json"
        command = [sys.executable, "-P", __file__, *sys.argv[1:], "--serve", str(offline)]
        server = SubprocessEndpoint(command, "the server", log=Path(folder) / "log.txt")
        with server as endpoint:
            timed = json.loads(offline.read_text(encoding="utf-8"))
            rows = [row_of(cell, over_http(endpoint, cell, options.repeats)) for cell in timed["cells"]]
    report = {"shape": options.shape, "device": timed["device"], "rows": rows}
    show(rows)
    if options.out is not None:
        write_json(options.out, report)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=["32/512"])
    parser.add_argument("--n", type=int, nargs="+", default=[1, 32, 128])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def serve(options: argparse.Namespace) -> None:
    cells = [(*WORKLOADS[name], n) for name in options.workloads for n in options.n]
    factory = functools.partial(
        timed_engine, options.shape, options.device, cells, options.repeats, options.serve
    )
    description = ModelDescription(synthetic_tokenizer(SHAPES[options.shape]["vocab_size"]))
    run_server(ServerOptions(port=0), "random", functools.partial(_same, description), factory)


def _same(description: ModelDescription) -> ModelDescription:
    return description


def timed_engine(
    shape: str,
    device: str,
    cells: list[tuple[int, int, int]],
    repeats: int,
    offline: Path,
    _: ModelDescription,
) -> Any:
    """The engine, once it has been timed offline."""
    import torch
    from scalegate.serving_check.engine.engine import Engine

    model = random_model(shape, device)
    most = max(n for _, _, n in cells)
    longest = max(input_len + output_len for input_len, output_len, _ in cells)
    sizes = EngineOptions(
        max_num_seqs=most,
        max_model_len=longest + 64,
        kv_cache_tokens=most * (longest + 64),
        page_size=64,
    )
    engine = Engine(model, sizes, frozenset())
    engine.warm_up()
    timed = []
    for input_len, output_len, n in cells:
        prompts = random_prompts(n, input_len, shape)
        asked = SamplingParams(max_tokens=output_len, temperature=0.0, ignore_eos=True)
        seconds = []
        for _ in range(repeats + 1):
            started = time.perf_counter()
            engine.generate(prompts, asked)
            seconds.append(time.perf_counter() - started)
        timed.append({"input_len": input_len, "output_len": output_len, "n": n, "seconds": seconds[1:]})
    name = torch.cuda.get_device_name() if device == "cuda" else device
    write_json(offline, {"device": name, "cells": timed})
    return engine


def synthetic_tokenizer(vocab_size: int) -> Any:
    """As many tokens as the model has, each a few letters: the cost of text without a real vocabulary."""
    from tokenizers import Tokenizer, decoders, models

    letters = string.ascii_letters + string.digits
    words = ("".join(word) for length in (1, 2, 3) for word in itertools.product(letters, repeat=length))
    vocabulary = {word: index for index, word in enumerate(itertools.islice(words, vocab_size))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def over_http(endpoint: Endpoint, cell: dict[str, Any], repeats: int) -> list[WorkloadResult]:
    """One wave a repeat, as offline; the first is not counted."""
    n, input_len, output_len = cell["n"], cell["input_len"], cell["output_len"]
    specs = [WorkloadSpec(n, n, input_len, output_len, seed=seed) for seed in range(repeats + 1)]
    return [run_workload(endpoint, spec) for spec in specs][1:]


def row_of(cell: dict[str, Any], results: list[WorkloadResult]) -> dict[str, Any]:
    n, output_len = cell["n"], cell["output_len"]
    errors = [error for result in results for error in result.errors]
    offline = [n * output_len / seconds for seconds in cell["seconds"]]
    http = [result.output_throughput for result in results]
    last = results[-1]
    latencies = {"ttft_ms": last.ttfts, "tpot_ms": last.tpots, "itl_ms": last.itls}
    return {
        "workload": f"{cell['input_len']}/{output_len}",
        "n": n,
        "offline_tok_s": median(offline),
        "http_tok_s": median(http),
        "ratio": median(http) / median(offline),
        "repeats": {"offline": offline, "http": http},
        "errors": errors[:3],
        "tokens_a_chunk": last.output_tokens / sum(len(request.itls) + 1 for request in last.requests),
        **{name: latency_summary(seconds) for name, seconds in latencies.items()},
        "step_ms": last.engine.step_ms,
        "host_ms": last.engine.host_ms,
        "device_idle_share": last.engine.device_idle_share,
        "running_mean": last.running_mean,
    }


def latency_summary(seconds: list[float]) -> dict[str, float] | None:
    """Mean, p50, p90 and p99 in milliseconds; None if nothing was measured."""
    if not seconds:
        return None
    figures = {"mean": sum(seconds) / len(seconds)}
    figures |= {f"p{percent}": percentile(seconds, percent) or 0.0 for percent in (50, 90, 99)}
    return {name: value * MILLISECONDS for name, value in figures.items()}


def show(rows: list[dict[str, Any]]) -> None:
    print("   in/out    N  offline     HTTP  ratio  a chunk  TTFT p50  TPOT p50  p99  step ms  host ms  idle")
    for row in rows:
        idle = row["device_idle_share"]
        print(
            f"{row['workload']:>9} {row['n']:>4} {row['offline_tok_s']:>8.0f} {row['http_tok_s']:>8.0f}"
            f" {row['ratio']:>6.3f} {row['tokens_a_chunk']:>8.2f} {row['ttft_ms']['p50']:>9.1f}"
            f" {row['tpot_ms']['p50']:>9.2f} {row['tpot_ms']['p99']:>6.2f} {row['step_ms']:>7.2f}"
            f" {row['host_ms']:>8.2f} {'' if idle is None else f'{idle:.1%}':>6} {row['errors'] or ''}"
        )


if __name__ == "__main__":
    main()
