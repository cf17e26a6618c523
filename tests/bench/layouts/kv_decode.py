"""Decoding alone in the engine at long contexts with each KV format: milliseconds a step, random weights.

    python -P tests/bench/layouts/kv_decode.py --out OUT/kv_decode.json
    python -P tests/bench/layouts/kv_decode.py --model tiny --device cpu --cells 2x64 --out tiny.json

The contexts are not computed: pages are taken as they lie, since speed does not depend on what they hold. A
cell is requests x tokens; its steps take each request over one page of 128 tokens, so that writing pages
counts as often as it does in the long run. Each format has a process of its own.
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
from scalegate.tests.bench.random_qwen3 import SHAPES, random_model, random_prompts

STEPS = 128
LARGEST_PAGE = 128
FORMATS = ["unquantized", "fp8", "kvarn_k4v2_g128", "kvarn_k4v4_g128", "int4_per_token_head", "nvfp4"]
CELLS = ["8x4096", "32x4096", "64x4096", "8x16384", "32x16384"]


def decode_ms(engine: Engine, model: str, requests: int, context: int, device: str) -> float:
    """Milliseconds a step, of the steps that end at `context` tokens."""
    params = SamplingParams(max_tokens=STEPS, temperature=0.0, ignore_eos=True)
    for index, prompt in enumerate(random_prompts(requests, context - STEPS, model)):
        engine.add_request(str(index), prompt, params)
    scheduler = engine.scheduler
    while scheduler.waiting:
        sequence = scheduler.waiting.popleft()
        engine.pool.admit(sequence)
        sequence.num_computed = sequence.length - 1
        scheduler.running.append(sequence)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    wait()
    started = time.perf_counter()
    while engine.has_work:
        engine.step()
    wait()
    return (time.perf_counter() - started) * 1000 / STEPS


def engine_of(
    kv_format: str, model: str, device: str, cells: list[tuple[int, int]], prefill_chunk: int | None = None
) -> Engine:
    """With room for each cell in whole pages."""
    most, longest = max(n for n, _ in cells), max(context for _, context in cells)
    options = EngineOptions(
        max_num_seqs=most,
        max_model_len=longest,
        kv_cache_dtype=kv_format,
        kv_cache_tokens=max(n * -(-context // LARGEST_PAGE) * LARGEST_PAGE for n, context in cells),
        prefill_chunk=prefill_chunk,
    )
    engine = Engine(random_model(model, device), options, frozenset())
    engine.warm_up(progress=False)
    return engine


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=SHAPES, default="qwen3-4b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--formats", nargs="+", default=FORMATS)
    parser.add_argument("--cells", nargs="+", default=CELLS)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    cells = [tuple(map(int, cell.split("x"))) for cell in options.cells]
    if options.alone:
        engine = engine_of(options.formats[0], options.model, options.device, cells)
        steps = {name: decode_ms(engine, options.model, *cell, options.device) for name, cell in
                 zip(options.cells, cells, strict=True)}  # fmt: skip
        write_json(options.out, {"ms": steps, "compilations": list(map(str, engine.stats().compilations))})
        return
    device = torch.cuda.get_device_name() if options.device == "cuda" else options.device
    result = {"device": device, "torch": torch.__version__, "model": options.model, "formats": {}}
    for name in options.formats:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "alone.json"
            own = ["--alone", "--formats", name, "--out", str(out)]
            rest = ["--model", options.model, "--device", options.device, "--cells", *options.cells]
            subprocess.run([sys.executable, "-P", __file__, *own, *rest], check=True)
            result["formats"][name] = json.loads(out.read_text(encoding="utf-8"))
        write_json(options.out, result)
        baseline = result["formats"].get("unquantized", result["formats"][name])["ms"]
        shown = (
            f"{cell} {ms:.2f} ({baseline[cell] / ms:.2f})"
            for cell, ms in result["formats"][name]["ms"].items()
        )
        print(f"{name:>20}", *shown, flush=True)


if __name__ == "__main__":
    main()
