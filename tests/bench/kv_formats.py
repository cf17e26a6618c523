"""The engine's speed on one GPU with each KV format, at contexts of 4k: offline API, random weights.

    python tests/bench/kv_formats.py --out results/kv_formats.json

Every engine serves the same prompts of 3,968 tokens with 128 tokens of output, N at once; one engine after
the other, on one model. The first engine of a process is up to 4% faster than the same one built later; so
the smaller N, where that would decide, are served in a second round, by engines none of which is the first,
and only that round counts. Speed does not depend on the weights' values.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch
from scalegate.serving_check.engine.engine import Engine
from scalegate.serving_check.engine.request import EngineConfig, SamplingParams
from transformers import PreTrainedModel

sys.path.insert(0, str(Path(__file__).parent))
from random_qwen3 import random_model, random_prompts

MODELS = ["qwen3-4b", "qwen3-8b"]
BASELINE = "unquantized"
INPUT, OUTPUT = 3968, 128
GREEDY = SamplingParams(max_tokens=OUTPUT, temperature=0.0, ignore_eos=True)
TIMED_STEPS = 64
FEW = 8
"""Up to so many requests together are served three times in each of two rounds; the second counts."""
ROUND = 3


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["qwen3-8b"])
    parser.add_argument("--formats", nargs="+", default=[BASELINE, "fp8", "int8_per_token_head"])
    parser.add_argument("--n", type=int, nargs="+", default=[1, 8, 16, 32, 64, 128])
    parser.add_argument("--prefill-chunk", type=int, default=8192)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "kv_formats.json")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    models = {name: measure(name, options) for name in options.models}
    results = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "input": INPUT,
        "output": OUTPUT,
        "prefill_chunk": options.prefill_chunk,
        "models": models,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def measure(model_name: str, options: argparse.Namespace) -> dict:
    model = random_model(model_name)
    formats: dict[str, dict] = {name: {"runs": {}, "compilations": []} for name in options.formats}
    for counts in (options.n, [n for n in options.n if n <= FEW]):
        for name, measured in formats.items():
            serve(model, name, counts, options, measured)
    for name in formats:
        show(model_name, name, formats)
    return formats


def serve(
    model: PreTrainedModel,
    kv_cache_dtype: str,
    counts: list[int],
    options: argparse.Namespace,
    measured: dict,
) -> None:
    """Add one engine's runs to what was measured, and what it compiled in them."""
    most = max(options.n)
    engine = Engine(
        model,
        EngineConfig(
            max_num_seqs=most,
            max_model_len=INPUT + OUTPUT,
            kv_cache_dtype=kv_cache_dtype,
            kv_cache_tokens=most * (INPUT + OUTPUT),
            prefill_chunk=options.prefill_chunk,
        ),
        frozenset(),
    )
    engine.warm_up(progress=False)
    for n in counts:
        for _ in range(ROUND if n <= FEW else 1):
            measured["runs"].setdefault(n, []).append(run(engine, n))
            print(kv_cache_dtype, n, measured["runs"][n][-1], flush=True)
    measured["compilations"] += [str(event) for event in engine.stats().compilations]
    del engine
    torch.cuda.empty_cache()


def run(engine: Engine, n: int) -> dict:
    """N requests from beginning to end, and of their decoding together a stretch of steps by itself."""
    prompts = random_prompts(n, INPUT, MODELS[0])
    torch.cuda.synchronize()
    started = time.perf_counter()
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, GREEDY)
    tokens = 0
    while engine.scheduler.waiting or any(sequence.is_prefilling for sequence in engine.scheduler.running):
        tokens += len(engine.step())
    tokens += len(engine.step())
    torch.cuda.synchronize()
    decoding = time.perf_counter()
    timed = 0
    for _ in range(TIMED_STEPS):
        timed += len(engine.step())
    torch.cuda.synchronize()
    decoded = time.perf_counter()
    while engine.has_work:
        tokens += len(engine.step())
    ended = time.perf_counter()
    if tokens + timed != n * OUTPUT:
        raise RuntimeError(f"{tokens + timed} tokens of {n * OUTPUT} arrived")
    return {
        "tok_s": n * OUTPUT / (ended - started),
        "prompts_s": decoding - started,
        "decode_tok_s": timed / (decoded - decoding),
    }


def medians(runs: list[dict]) -> dict[str, float]:
    """Of the last round."""
    return {key: statistics.median(one[key] for one in runs[-ROUND:]) for key in runs[0]}


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
