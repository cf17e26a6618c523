"""Engines as on an older GPU, offline: code for 8.0 or 8.9, which a Hopper GPU's driver translates.

    python -P tests/bench/engine/older_gpu_engine.py int4@9.0 int4@8.0 --out OUT/int4_older.json
    python -P tests/bench/engine/older_gpu_engine.py --model qwen3-4b --out OUT/kvarn_older.json \\
        bf16@8.0 kvarn_k4v2_g128@8.0 kvarn_k4v2_g128@8.9

Each engine is WHAT@CAPABILITY in a process of its own: weights in bf16 or INT4, or a KV format with weights
in bf16. All warm up at once, then take turns at every N; a figure is the best of its repeats. The table has
each engine's tokens a second, these over the first engine's, and how much they grow from the smallest N to
the largest. 9.0-apart is 9.0 where no kernel begins while the one ahead runs. Exit status 1 where anything
was compiled once an engine was warm. The weights are random, INT4 in groups of 128, the output layer in bf16.
cuBLAS runs as on Hopper for all. Not for HTTP.
"""

import argparse
import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from scalegate.tests.bench.random_qwen3 import SHAPES

INPUT_LEN, OUTPUT_LEN = 32, 512
AT_ONCE = (1, 16, 64, 128)
INT4 = "int4"
BF16 = "bf16"
ITSELF, APART = "9.0", "9.0-apart"


class EngineProcess:
    """One engine in a process of its own, warm and waiting."""

    def __init__(self, name: str, options: argparse.Namespace):
        self.name = name
        command = [sys.executable, "-P", __file__, "--child", name, "--model", options.model]
        command += ["--device", options.device, "--output-len", str(options.output_len)]
        command += ["--n", *map(str, options.n)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def receive(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended with status {self._process.wait()}")
        return json.loads(line)

    def ask(self, n: int) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{n}\n")
        self._process.stdin.flush()
        return self.receive()

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


def serve(name: str, options: argparse.Namespace) -> None:
    """The engine's process: a line of JSON once it is warm, and one for each N that it is asked."""
    what, _, capability = name.partition("@")
    if options.device == "cuda" and capability == APART:
        launch_apart()
    elif options.device == "cuda" and capability != ITSELF:
        from scalegate.tests.bench.kernels.older_gpu import pretend

        pretend(*map(int, capability.split(".")))
    answers = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        engine = warm_engine(what, capability, options)
        from scalegate.tests.bench.layouts.kv_table import tokens_per_second

        print(json.dumps({"ready": name}), file=answers, flush=True)
        for line in sys.stdin:
            n = int(line)
            speed = tokens_per_second(engine, options, n, INPUT_LEN, options.output_len)
            compiled = [str(event) for event in engine.stats().compilations]
            print(json.dumps({"tok_s": speed, "compiled": compiled}), file=answers, flush=True)


def launch_apart() -> None:
    """Begin no kernel before the one ahead has ended, which an older GPU cannot do either."""
    from triton.backends.nvidia.driver import CudaLauncher

    initialize = CudaLauncher.__init__

    def initialize_apart(launcher: Any, *arguments: Any, **options: Any) -> None:
        initialize(launcher, *arguments, **options)
        launcher.launch_pdl = False

    CudaLauncher.__init__ = initialize_apart


def warm_engine(what: str, capability: str, options: argparse.Namespace) -> Any:
    # Only now, since torch and Triton have been told what GPU they find.
    import torch
    from scalegate.serving_check.engine.engine import Engine
    from scalegate.serving_check.engine.options import EngineOptions
    from scalegate.tests.bench.engine.int4_engine import merged, quantized
    from scalegate.tests.bench.random_qwen3 import random_model

    model = random_model(options.model, options.device)
    if options.device == "cuda":
        model = merged(model)
    if what == INT4:
        model = quantized(model, "swap_ab" if capability in (ITSELF, APART) else "int4_portable")
        torch.cuda.empty_cache()
    length = INPUT_LEN + options.output_len
    config = EngineOptions(
        max_num_seqs=max(options.n),
        max_model_len=length + 16,
        kv_cache_dtype="unquantized" if what in (INT4, BF16) else what,
        # A page of 128 tokens more than each request takes.
        kv_cache_tokens=max(options.n) * (length + 128),
        prefill_chunk=8192,
    )
    engine = Engine(model, config, frozenset())
    engine.warm_up(progress=False)
    engine.jit_monitor.arm()
    return engine


def table(names: list[str], speed: dict[str, dict[int, float]], ns: list[int]) -> list[str]:
    first = speed[names[0]]
    lines = [f"{'tok/s (over the first)':<28}" + "".join(f"{f'N={n}':>18}" for n in ns) + f"{'growth':>8}"]
    for name in names:
        own = speed[name]
        cells = "".join(f"{f'{own[n]:.0f} ({own[n] / first[n]:.3f})':>18}" for n in ns)
        lines.append(f"{name:<28}{cells}{own[max(ns)] / own[min(ns)]:>7.1f}x")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engines", nargs="*", metavar="WHAT@CAPABILITY")
    parser.add_argument("--model", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--n", type=int, nargs="+", default=list(AT_ONCE))
    parser.add_argument("--output-len", type=int, default=OUTPUT_LEN)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cuda", help="cpu pretends nothing: a trial of this script")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        serve(options.child, options)
        return
    engines = [EngineProcess(name, options) for name in options.engines]
    speed: dict[str, dict[int, float]] = {engine.name: {} for engine in engines}
    compiled: dict[str, list[str]] = {}
    try:
        for engine in engines:
            print(engine.receive(), flush=True)
        for n in options.n:
            for _ in range(options.repeats):
                for engine in engines:
                    answer = engine.ask(n)
                    own = speed[engine.name]
                    own[n] = max(own.get(n, 0.0), answer["tok_s"])
                    compiled[engine.name] = answer["compiled"]
            told = ", ".join(f"{engine.name} {speed[engine.name][n]:.0f}" for engine in engines)
            print(f"N={n}: {told} tok/s", flush=True)
    finally:
        for engine in engines:
            engine.end()
    if options.out:
        load = f"{INPUT_LEN}/{options.output_len}"
        results = {"model": options.model, "load": load, "tok_s": speed, "compiled": compiled}
        options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print("\n".join(["", *table(options.engines, speed, options.n)]))
    if any(compiled.values()):
        sys.exit(f"COMPILED AFTER WARM-UP: {compiled}")


if __name__ == "__main__":
    main()
