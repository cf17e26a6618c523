"""A mixture of experts in the engine: INT4 beside unquantized, Qwen3-30B-A3B's shape cut to 8 layers.

    python -P tests/bench/engine/moe.py --out OUT/moe.json

32 tokens in, 512 out. Both engines are up at once and take turns at every N; weights are random. `--vllm`
measures vLLM's unquantized model afterwards in a process of its own, by `moe_vllm.py`, where vLLM can be
imported: the same shape, lengths and sampling. Experts are taken by chance, as random weights take them;
how many different tokens a step draws is shown, since one token drawn everywhere would flatter all of them.
Exit status 1 where anything was compiled once both were warm.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from scalegate.layouts.formats.int4 import Int4
from scalegate.layouts.modules.experts import ExpertsPart, PackedExperts, is_experts, parameters_of
from scalegate.layouts.packing.all_layouts import LAYOUTS
from scalegate.serving_check.engine.engine import Engine
from scalegate.serving_check.engine.options import EngineOptions
from scalegate.tests.bench.engine.int4_engine import decode_split, merged, quantized, show_split
from scalegate.tests.bench.engine.serving import greedy, prompts, wave
from scalegate.tests.bench.random_qwen3 import random_model
from transformers import PreTrainedModel

MODEL = "qwen3-30b-a3b-8-layers"
SPEC = Int4(128)
INPUT_LEN, OUTPUT_LEN = 32, 512
BARS = {1: 1.3, 8: 1.3, 32: 1.0, 64: 1.0, 128: 1.0}
"""Least ratio of INT4 to unquantized."""
VLLM_BAR = 0.95
REPEATS = 2


def main() -> None:
    options = arguments()
    engines = {"unquantized": warm_engine(merged(random_model(MODEL)))}
    engines["int4"] = warm_engine(with_int4_experts(quantized(merged(random_model(MODEL)), "swap_ab")))
    for engine in engines.values():
        engine.jit_monitor.arm()
    rows = [row(engines, n) for n in options.n]
    splits = [
        {"engine": name, **decode_split(engine, n)} for n in options.split for name, engine in engines.items()
    ]
    compiled = {
        name: [str(event) for event in engine.stats().compilations] for name, engine in engines.items()
    }
    engines.clear()
    torch.cuda.empty_cache()
    if options.vllm:
        add_vllm(rows)
    results = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "model": MODEL,
        "rows": rows,
        "decode_steps": splits,
        "compiled_after_warm_up": compiled,
    }
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    for split in splits:
        show_split(split)
    show(rows)
    if any(compiled.values()):
        sys.exit(f"COMPILED AFTER WARM-UP: {compiled}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--n", type=int, nargs="+", default=list(BARS))
    parser.add_argument("--split", type=int, nargs="*", default=[1, 32], help="N of the profiled steps")
    parser.add_argument("--vllm", action="store_true", help="measure vLLM too")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def with_int4_experts(model: PreTrainedModel) -> PreTrainedModel:
    """Every experts module with random INT4 weights of its shape, packed as the loader packs them."""
    layout: Any = LAYOUTS["grouped_int4"]
    found = {name: module for name, module in model.named_modules() if is_experts(module)}
    for name, module in found.items():
        products = {}
        for parameter, weight in parameters_of(module).items():
            experts, n, k = weight.shape
            weights = [SPEC.random(n, k, weight.device) for _ in range(experts)]
            products[parameter] = [ExpertsPart(layout.pack_experts(weights, weight.dtype))]
        model.set_submodule(name, PackedExperts(module, products))
    return model


def warm_engine(model: PreTrainedModel) -> Engine:
    started = time.perf_counter()
    options = EngineOptions(max_num_seqs=128, max_model_len=1024, kv_cache_tokens=128 * 640)
    engine = Engine(model, options, frozenset())
    engine.warm_up(progress=False)
    engine.jit_monitor.disarm()  # Until the other engine is warm too.
    torch.cuda.synchronize()
    print(f"constructed and warmed up in {time.perf_counter() - started:.1f} s", flush=True)
    return engine


def row(engines: dict[str, Engine], n: int) -> dict[str, Any]:
    """Tokens a second of both at one N, the better of two turns each."""
    speed: dict[str, float] = dict.fromkeys(engines, 0.0)
    for _ in range(REPEATS):
        for name, engine in engines.items():
            seconds, _ = wave(engine, n, INPUT_LEN, greedy(OUTPUT_LEN))
            speed[name] = max(speed[name], n * OUTPUT_LEN / seconds)
    last = [
        completion.token_ids[-1]
        for completion in engines["unquantized"].generate(prompts(n, INPUT_LEN), greedy(64))
    ]
    ratio = speed["int4"] / speed["unquantized"]
    print(f"N={n}: {speed}, {ratio:.3f}, {len(set(last))} different tokens", flush=True)
    return {"n": n, "tok_s": speed, "ratio": ratio, "bar": BARS.get(n), "different_tokens": len(set(last))}


def add_vllm(rows: list[dict[str, Any]]) -> None:
    script = Path(__file__).parent / "moe_vllm.py"
    ns = [str(row["n"]) for row in rows]
    command = [sys.executable, "-P", str(script), "--n", *ns, "--repeats", str(REPEATS)]
    answer = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()[-1]
    measured = {load["n"]: load for load in json.loads(answer)}
    for row in rows:
        theirs = measured[row["n"]]
        row["vllm_tok_s"] = theirs["tok_s"]
        row["vllm_different_tokens"] = theirs["different_tokens"]
        row["ratio_to_vllm"] = row["tok_s"]["unquantized"] / theirs["tok_s"]


def show(rows: list[dict[str, Any]]) -> None:
    print(f"\n{'N':>4} {'bf16':>7} {'INT4':>7} {'ratio':>6} {'bar':>5} {'vLLM':>7} {'ratio':>6} {'bar':>5}")
    for row in rows:
        print(
            f"{row['n']:>4} {row['tok_s']['unquantized']:>7.0f} {row['tok_s']['int4']:>7.0f} "
            f"{row['ratio']:>6.3f} {row['bar'] or 0:>5.2f} {row.get('vllm_tok_s', 0):>7.0f} "
            f"{row.get('ratio_to_vllm', 0):>6.3f} {VLLM_BAR:>5.2f}"
        )


if __name__ == "__main__":
    main()
