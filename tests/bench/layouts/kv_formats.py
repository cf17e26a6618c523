"""The engine's speed on one GPU with each KV format: offline API, random weights, contexts of 4k unless told.

    python -P tests/bench/layouts/kv_formats.py --out OUT/kv_formats.json
    python -P tests/bench/layouts/kv_formats.py --models qwen3-4b --formats unquantized fp8 kvarn_k4v2_g128 \
        --input 16256 --n 8 32 --out 16k.json
    python -P tests/bench/layouts/kv_formats.py --models qwen3-4b --input 32 --output 512 --out short.json
    python -P tests/bench/layouts/kv_formats.py --models tiny --device cpu --n 1 2 --input 64 --out tiny.json

Every engine serves the same prompts, N at once, 3,968 tokens in and 128 out, each in a process
of its own, as a server's is: one that is built where another has been may be 4% slower. Speed does not depend
on the weights' values.
"""

import argparse
import json
import statistics
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

BASELINE = "unquantized"
TIMED_STEPS = 64
FEW, REPEATS = 8, 3
"""Up to so many requests together are served so often, and the median counts; more of them once."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=["qwen3-8b"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--formats", nargs="+", default=[BASELINE, "fp8", "int8_per_token_head"])
    parser.add_argument("--n", type=int, nargs="+", default=[1, 8, 16, 32, 64, 128])
    parser.add_argument("--input", type=int, default=3968, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--prefill-chunk", type=int, default=8192)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = arguments()
    if options.alone:
        write_json(options.out, serve(options))
        return
    models = {model: measure(model, options) for model in options.models}
    results = {
        "device": torch.cuda.get_device_name() if options.device == "cuda" else options.device,
        "torch": torch.__version__,
        "input": options.input,
        "output": options.output,
        "prefill_chunk": options.prefill_chunk,
        "models": models,
    }
    write_json(options.out, results)


def measure(model: str, options: argparse.Namespace) -> dict:
    formats: dict[str, dict] = {}
    for name in options.formats:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "alone.json"
            own = ["--alone", "--models", model, "--formats", name, "--out", str(out)]
            rest = ["--device", options.device, "--input", str(options.input), "--n", *map(str, options.n)]
            rest += ["--prefill-chunk", str(options.prefill_chunk), "--output", str(options.output)]
            subprocess.run([sys.executable, "-P", __file__, *own, *rest], check=True)
            formats[name] = json.loads(out.read_text(encoding="utf-8"))
        show(model, name, formats)
    return formats


def serve(options: argparse.Namespace) -> dict:
    """The runs with one format on one model, by N, and what was compiled in them."""
    ((model,), (kv_cache_dtype,)) = options.models, options.formats
    most, longest = max(options.n), options.input + options.output
    engine = Engine(
        random_model(model, options.device),
        EngineOptions(
            max_num_seqs=most,
            max_model_len=longest,
            kv_cache_dtype=kv_cache_dtype,
            kv_cache_tokens=most * longest,
            prefill_chunk=options.prefill_chunk,
        ),
        frozenset(),
    )
    engine.warm_up(progress=False)
    runs: dict[str, list[dict]] = {}
    for n in options.n:
        runs[str(n)] = [run(engine, n, model, options) for _ in range(REPEATS if n <= FEW else 1)]
        print(kv_cache_dtype, n, medians(runs[str(n)]), flush=True)
    return {"runs": runs, "compilations": [str(event) for event in engine.stats().compilations]}


def run(engine: Engine, n: int, model: str, options: argparse.Namespace) -> dict:
    """N requests from beginning to end, and of their decoding together a stretch of steps by itself."""
    prompts = random_prompts(n, options.input, model)
    greedy = SamplingParams(max_tokens=options.output, temperature=0.0, ignore_eos=True)
    wait = torch.cuda.synchronize if options.device == "cuda" else lambda: None
    wait()
    started = time.perf_counter()
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, greedy)
    tokens = 0
    while engine.scheduler.waiting or any(sequence.is_prefilling for sequence in engine.scheduler.running):
        tokens += len(engine.step())
    tokens += len(engine.step())
    wait()
    decoding = time.perf_counter()
    timed = 0
    for _ in range(TIMED_STEPS):
        timed += len(engine.step())
    wait()
    decoded = time.perf_counter()
    while engine.has_work:
        tokens += len(engine.step())
    ended = time.perf_counter()
    if tokens + timed != n * options.output:
        raise RuntimeError(f"{tokens + timed} tokens of {n * options.output} arrived")
    return {
        "tok_s": n * options.output / (ended - started),
        "prompts_s": decoding - started,
        "decode_tok_s": timed / (decoded - decoding),
    }


def medians(runs: list[dict]) -> dict[str, float]:
    return {key: statistics.median(run[key] for run in runs) for key in runs[0]}


def show(model_name: str, name: str, formats: dict[str, dict]) -> None:
    """One format's figures, with their ratios to the baseline where that was measured."""
    baseline = formats.get(BASELINE, formats[name])["runs"]
    compiled = ", ".join(formats[name]["compilations"]) or "nothing"
    print(f"{model_name}, {name}; compiled after warm-up: {compiled}")
    print("   N    tok/s  ratio  prompts s  ratio  decode tok/s  ratio")
    for n, runs in formats[name]["runs"].items():
        own, other = medians(runs), medians(baseline[n])
        print(
            f"{n:>4} {own['tok_s']:>8.0f} {own['tok_s'] / other['tok_s']:>6.3f} "
            f"{own['prompts_s']:>10.3f} {own['prompts_s'] / other['prompts_s']:>6.3f} "
            f"{own['decode_tok_s']:>13.0f} {own['decode_tok_s'] / other['decode_tok_s']:>6.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
