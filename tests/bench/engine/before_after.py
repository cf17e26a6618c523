"""Decode speed of two trees of Scalegate side by side: before a change and after it, in one call.

    python -P tests/bench/engine/before_after.py --before OTHER_TREE --out before_after.json
    python -P tests/bench/engine/before_after.py --before OTHER_TREE --checkpoint FOLDER       on a CPU

The shapes of Qwen3-8B, 4B and 30B-A3B (this one cut to 8 layers) with random weights, or a checkpoint; bf16,
INT4, FP8 and W4A8, 32 tokens in. Every engine is a process of its own tree; both trees' are up together and
take turns at every N, so that they meet the same moments of the machine. The figure is the best of the
repeats: tokens a second, on a CPU a second of one thread's own time. There the same tree differs by 8% from
start to start, by where its memory happens to lie: give it several `--starts`. Exit status 1 where after
falls below `--floor` of before.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
INPUT_LEN = 32
MODELS = {"8b": "qwen3-8b", "4b": "qwen3-4b", "moe": "qwen3-30b-a3b-8-layers"}
WEIGHTS = ("bf16", "int4", "fp8", "int4-fp8")
TREES = ("before", "after")


@dataclass
class Worker:
    """One engine of one tree; it measures when it is sent an N."""

    process: subprocess.Popen

    def measure(self, n: int) -> float:
        """Tokens a second."""
        print(n, file=self.process.stdin, flush=True)
        return float(self.answer())

    def answer(self) -> str:
        """The next line that is for us; libraries print, too."""
        while line := self.process.stdout.readline():
            if line.startswith("="):
                return line[1:].strip()
        raise SystemExit("an engine ended; its errors are above")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", type=Path, help="the tree to compare with")
    parser.add_argument("--n", type=int, nargs="+", default=[1, 16, 64, 128])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--weights", nargs="+", choices=WEIGHTS, default=list(WEIGHTS[:2]))
    parser.add_argument("--checkpoint", type=Path, help="instead of these models, and on a CPU")
    parser.add_argument("--output-len", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--starts", type=int, default=1, help="how often all engines are started anew")
    parser.add_argument("--floor", type=float, default=0.99)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        tree, model, weights, output_len = options.worker
        work(Path(tree), model, weights, int(output_len))
        return
    trees = {"before": options.before.resolve(), "after": ROOT}
    models = [str(options.checkpoint.resolve())] if options.checkpoint else options.models
    rows = [row for model in models for row in compare(model, trees, options)]
    if options.out:
        options.out.write_text(json.dumps({"rows": rows}, indent=1) + "\n", encoding="utf-8")
    print(f"\n{'':8} {'N':>4} {'before':>8} {'after':>8} {'ratio':>6}")
    print("\n".join(map(show, rows)))
    low = [row for row in rows if row["ratio"] < options.floor]
    if low:
        sys.exit(f"{len(low)} of {len(rows)} cells are under {options.floor} of before")


def compare(model: str, trees: dict[str, Path], options: argparse.Namespace) -> list[dict[str, Any]]:
    speeds: dict[tuple[str, int, str], list[float]] = defaultdict(list)
    for _, weights in itertools.product(range(options.starts), options.weights):
        with engines(model, weights, trees, options.output_len) as workers:
            for n, repeat in itertools.product(options.n, range(options.repeats)):
                for tree in TREES if repeat % 2 == 0 else reversed(TREES):
                    speeds[weights, n, tree].append(workers[tree].measure(n))
                if repeat == options.repeats - 1:
                    print(show(row(model, weights, n, speeds)), flush=True)
    return [row(model, weights, n, speeds) for weights, n in itertools.product(options.weights, options.n)]


@contextmanager
def engines(model: str, weights: str, trees: dict[str, Path], output_len: int) -> Iterator[dict[str, Worker]]:
    """One for each tree, warm."""
    with tempfile.TemporaryDirectory() as elsewhere:
        workers = {
            tree: start(path, Path(elsewhere) / f"{tree}-root", model, weights, output_len)
            for tree, path in trees.items()
        }
        try:
            for worker in workers.values():
                print(worker.answer(), flush=True)
            yield workers
        finally:
            for worker in workers.values():
                worker.process.kill()
                worker.process.wait()


def row(model: str, weights: str, n: int, speeds: dict[tuple[str, int, str], list[float]]) -> dict[str, Any]:
    """The best of each tree so far."""
    found = {tree: speeds[weights, n, tree] for tree in TREES}
    best = {tree: max(speeds) for tree, speeds in found.items()}
    ratio = best["after"] / best["before"]
    return {"model": Path(model).name, "weights": weights, "n": n, **best, "ratio": ratio, "all": found}


def show(row: dict[str, Any]) -> str:
    return (
        f"{row['model']} {row['weights']:5} {row['n']:>4} {row['before']:>8.0f} {row['after']:>8.0f} "
        f"{row['ratio']:>6.3f}"
    )


def start(tree: Path, root: Path, *work: object) -> Worker:
    """An engine of `tree`."""
    command = [sys.executable, "-P", str(Path(__file__).resolve()), "--worker", str(tree), *map(str, work)]
    pipe, environment = subprocess.PIPE, environment_of(tree, root)
    return Worker(subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True, cwd=root))


def environment_of(tree: Path, root: Path) -> dict[str, str]:
    """In which `tree` is imported as `scalegate`, by way of a link in `root`."""
    root.mkdir(exist_ok=True)
    if not (root / "scalegate").exists():
        (root / "scalegate").symlink_to(tree)
    rest = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    rest = [path for path in rest if not (Path(path) / "scalegate").exists()]
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), *rest])}


def work(tree: Path, model: str, weights: str, output_len: int) -> None:
    """In the worker: this tree's own engine and benches."""
    seconds = seconds_on_cuda if model in MODELS else seconds_on_cpu
    seconds_of = seconds(model, weights, output_len)
    print(f"={tree.name} {Path(model).name} {weights} is warm", flush=True)
    for line in sys.stdin:
        n = int(line)
        print(f"={n * output_len / seconds_of(n)}", flush=True)


def seconds_on_cuda(model: str, weights: str, output_len: int) -> Callable[[int], float]:
    """An engine that is warm; what it takes for n requests."""
    from scalegate.layouts.formats.fp8 import FP8
    from scalegate.layouts.formats.int4 import Int4
    from scalegate.tests.bench.engine import int4_engine, moe, serving
    from scalegate.tests.bench.random_qwen3 import random_model

    built = random_model(MODELS[model])
    built = int4_engine.merged(built) if hasattr(int4_engine, "merged") else built
    if weights == "int4":
        int4_engine.quantized(built, "swap_ab")
        built = moe.with_int4_experts(built)
    elif weights == "fp8":
        int4_engine.quantized(built, "fp8_scaled", FP8())
    elif weights == "int4-fp8":
        int4_engine.quantized(built, "int4_fp8", Int4(128, symmetric=True, activations="fp8"))
    length = INPUT_LEN + output_len
    sizes = {"max_num_seqs": 128, "max_model_len": 1024, "prefill_chunk": 8192}
    engine = warm_engine(built, {**sizes, "kv_cache_tokens": 128 * (length + 16)})
    return lambda n: serving.wave(engine, n, INPUT_LEN, serving.greedy(output_len))[0]


def seconds_on_cpu(model: str, weights: str, output_len: int) -> Callable[[int], float]:
    """The same of a checkpoint, in seconds of this process, which has one thread for products."""
    import torch
    from scalegate.serving_check.engine.request import SamplingParams
    from scalegate.tests.bench.engine import int4_engine
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    built = int4_engine.merged(AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval())
    if weights == "int4":
        int4_engine.quantized(built, "cpu_int4")
    length = INPUT_LEN + output_len
    sizes = {"max_num_seqs": 128, "max_model_len": length, "kv_cache_tokens": 128 * (length + 16)}
    engine = warm_engine(built, sizes)
    greedy = SamplingParams(max_tokens=output_len, temperature=0.0, ignore_eos=True)

    def seconds(n: int) -> float:
        prompts = [[(n + 7919 * index + place) % 8000 for place in range(INPUT_LEN)] for index in range(n)]
        started = time.process_time()
        engine.generate(prompts, greedy)
        return time.process_time() - started

    return seconds


def warm_engine(model: Any, sizes: dict[str, int]) -> Any:
    """Whatever the tree calls an engine's options."""
    from scalegate.serving_check.engine import request
    from scalegate.serving_check.engine.engine import Engine

    options: Any = getattr(request, "EngineConfig", None)
    if options is None:
        from scalegate.serving_check.engine.options import EngineOptions as options
    engine = Engine(model, options(**sizes), frozenset())
    engine.warm_up(progress=False)
    return engine


if __name__ == "__main__":
    main()
