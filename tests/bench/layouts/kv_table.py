"""One table of KV formats from one call: both loads of the bar, and decoding alone at long contexts.

    python -P tests/bench/layouts/kv_table.py unquantized kvarn_k4v2_g128 --out OUT/kv_table.json
    python -P tests/bench/layouts/kv_table.py unquantized kvarn_k4v2_g128 --model tiny --device cpu \
        --loads 16x8 \
        --n 1 2 --decoded 2x256 --out tiny.json

One process and one engine a format, 35 to 45 seconds each once its kernels are compiled; random weights of
Qwen3-4B. Printed are tokens a second, or milliseconds a step of decoding alone: each as it is found, then of
each format all, with how many times faster than the first format that is.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# Sets OpenMP's threads as it does for the commands, which has to come before torch.
import scalegate.pipeline  # noqa: F401
import torch
from scalegate.base.atomic_files import write_json
from scalegate.serving_check.engine.engine import Engine
from scalegate.serving_check.engine.options import EngineOptions
from scalegate.serving_check.engine.request import SamplingParams
from scalegate.tests.bench.layouts.kv_decode import decode_ms
from scalegate.tests.bench.random_qwen3 import SHAPES, random_model, random_prompts

MODEL = "qwen3-4b"
LOADS = ["512x128", "32x512"]
AT_ONCE = [1, 8, 16, 32, 64, 128]
DECODED = ["8x4096", "32x4096", "64x4096", "8x16384", "32x16384"]


def tokens_per_second(engine: Engine, options: argparse.Namespace, n: int, length: int, output: int) -> float:
    params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
    prompts = random_prompts(n, length, options.model)
    wait = torch.cuda.synchronize if options.device == "cuda" else lambda: None
    wait()
    started = time.perf_counter()
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, params)
    while engine.has_work:
        engine.step()
    wait()
    return n * output / (time.perf_counter() - started)


def measure(name: str, options: argparse.Namespace) -> dict:
    loads = [tuple(map(int, load.split("x"))) for load in options.loads]
    decoded = [tuple(map(int, cell.split("x"))) for cell in options.decoded]
    needed = [max(options.n) * sum(load) for load in loads] + [n * context for n, context in decoded]
    longest = max([sum(load) for load in loads] + [context for _, context in decoded])
    engine_options = EngineOptions(
        max_num_seqs=max(options.n), max_model_len=longest, kv_cache_dtype=name, kv_cache_tokens=max(needed)
    )
    engine = Engine(random_model(options.model, options.device), engine_options, frozenset())
    engine.warm_up(progress=False)
    result: dict[str, float] = {}

    def found(cell: str, value: float) -> None:
        result[cell] = value
        print(f"{name} {cell}: {value:.5g}", flush=True)

    for load, sizes in zip(options.loads, loads, strict=True):
        for n in options.n:
            runs = [tokens_per_second(engine, options, n, *sizes) for _ in range(options.repeats)]
            found(f"{load} N={n}", max(runs))
    for cell, sizes in zip(options.decoded, decoded, strict=True):
        found(f"decode {cell}", decode_ms(engine, options.model, *sizes, options.device))
    return {"figures": result, "compilations": [str(event) for event in engine.stats().compilations]}


def show(name: str, result: dict, baseline: dict) -> None:
    parts = []
    for cell, value in result["figures"].items():
        other = baseline["figures"][cell]
        ratio = other / value if cell.startswith("decode") else value / other
        parts.append(f"{cell} {value:.4g} ({ratio:.2f})")
    print(f"{name}, compiled {len(result['compilations'])}:", "; ".join(parts), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("formats", nargs="+")
    parser.add_argument("--model", choices=SHAPES, default=MODEL)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--loads", nargs="*", default=LOADS, help="tokens in x out")
    parser.add_argument("--n", type=int, nargs="+", default=AT_ONCE)
    parser.add_argument("--decoded", nargs="*", default=DECODED, help="requests x tokens of context")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.alone:
        write_json(options.out, measure(options.formats[0], options))
        return
    device = torch.cuda.get_device_name() if options.device == "cuda" else options.device
    result: dict = {"device": device, "torch": torch.__version__, "formats": {}}
    for name in options.formats:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "alone.json"
            command = [sys.executable, "-P", __file__, name, "--alone", "--out", str(out)]
            command += ["--loads", *options.loads, "--n", *map(str, options.n)]
            command += ["--decoded", *options.decoded, "--repeats", str(options.repeats)]
            command += ["--model", options.model, "--device", options.device]
            subprocess.run(command, check=True)
            result["formats"][name] = json.loads(out.read_text(encoding="utf-8"))
        write_json(options.out, result)
        show(name, result["formats"][name], result["formats"][options.formats[0]])


if __name__ == "__main__":
    main()
