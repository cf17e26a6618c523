"""The engine on INT4 weights beside the same engine on bf16 ones: Qwen3-8B's shape, 32 tokens in, 512 out.

    python -P tests/bench/engine/int4_engine.py --out OUT/int4_engine.json

Both engines are up at once and take turns at every N. The INT4 weights (groups of 128, integer zeros) are
random, packed for products merged as in a model that was loaded; the output layer stays bf16. vLLM's figures
were taken earlier on another H200. Exit status 1 where anything was compiled once both were warm. Not for
HTTP, nor for the kernels alone (`linear.py`).
"""

import argparse
import json
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from scalegate.layouts.formats.int4 import Int4
from scalegate.layouts.formats.weight_format import Weight, WeightFormat
from scalegate.layouts.modules.linear import QuantizedLinear
from scalegate.layouts.modules.merged_linear import layers_with_one_input, merge_unquantized
from scalegate.layouts.packing.all_layouts import LAYOUTS
from scalegate.serving_check.engine.attention import attention_layers
from scalegate.serving_check.engine.engine import Engine
from scalegate.serving_check.engine.options import EngineOptions
from scalegate.tests.bench.engine.serving import PROFILED_STEPS, covered, greedy, profiled_steps, wave
from scalegate.tests.bench.random_qwen3 import random_model
from torch import nn
from transformers import PreTrainedModel

SPEC = Int4(128)
INPUT_LEN, OUTPUT_LEN = 32, 512
BARS = {1: 1.45, 8: 1.45, 16: 1.45, 32: 1.35, 64: 1.15, 128: 1.0}
VLLM_INT4 = {1: 297, 8: 2284, 16: 4223, 32: 7051, 64: 9917, 128: 15812}
"""vLLM 0.26, offline API, the better of Marlin and Machete; an earlier run, not this one."""
KERNELS_KEPT = 16
CHECKED_MS = (1, 16, 37, 128)
MAX_ERROR = 4e-3
"""Relative L2 of a product against the dequantized weight's in fp32, as for the kernels."""


def main() -> None:
    options = arguments()
    engines = {"bf16": warm_engine(merged(random_model("qwen3-8b")))}
    engines["int4"] = warm_engine(quantized(merged(random_model("qwen3-8b")), options.layout))
    for engine in engines.values():
        engine.jit_monitor.arm()
    rows = [row(engines, n) for n in options.n]
    splits = [
        {"engine": name, **decode_split(engine, n)} for n in options.split for name, engine in engines.items()
    ]
    compiled = {
        name: [str(event) for event in engine.stats().compilations] for name, engine in engines.items()
    }
    results = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "layout": options.layout,
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
    parser.add_argument("--split", type=int, nargs="*", default=[1, 32, 128], help="N of the profiled steps")
    parser.add_argument("--layout", default="swap_ab")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def merged(model: PreTrainedModel) -> PreTrainedModel:
    """Linears that share an input are one product, as in a model that was loaded."""
    merge_unquantized(model, layers_with_one_input(model, lambda: attention_layers(model)))
    return model


def quantized(
    model: PreTrainedModel, layout: str, spec: WeightFormat = SPEC, least_rows: int = 1
) -> PreTrainedModel:
    """Every product of the layers with random weights, packed for `layout`, each shape checked once.

    Products with fewer than `least_rows` outputs stay as they are.
    """
    packed: dict[nn.Linear, QuantizedLinear] = {}
    checked: set[tuple[int, int]] = set()
    for parent in list(model.model.layers.modules()):
        for name, linear in list(parent.named_children()):
            if type(linear) is not nn.Linear or linear.out_features < least_rows:
                continue
            if linear not in packed:  # A merged one is a child of each layer that it stands for.
                weight = spec.random(*linear.weight.shape, linear.weight.device)
                packed[linear] = QuantizedLinear(LAYOUTS[layout].pack(weight, linear.weight.dtype), None)
                if weight.shape not in checked:
                    checked.add(weight.shape)
                    check(packed[linear], weight)
            setattr(parent, name, packed[linear])
    return model


@torch.inference_mode()
def check(linear: QuantizedLinear, weight: Weight) -> None:
    device = next(iter(weight.tensors().values())).device
    for m in CHECKED_MS:
        x = torch.randn(m, weight.shape[1], dtype=linear.dtype, device=device)
        inputs = x.float() if linear.input_format is None else linear.input_format.round(x.float())
        expected = inputs @ weight.dequantize(torch.float32).T
        error = ((linear(x).float() - expected).norm() / expected.norm()).item()
        if not error <= MAX_ERROR:
            raise RuntimeError(f"{weight.shape}, M={m}: relative error {error:.2e}")


def warm_engine(model: PreTrainedModel) -> Engine:
    started = time.perf_counter()
    # The most that is asked of it: two such pools and both models fit into 80 GB.
    tokens = max(BARS) * (INPUT_LEN + OUTPUT_LEN + 16)
    config = EngineOptions(max_num_seqs=128, max_model_len=4096, kv_cache_tokens=tokens, prefill_chunk=8192)
    engine = Engine(model, config, frozenset())
    engine.warm_up(progress=False)
    engine.jit_monitor.disarm()  # Until the other engine is warm too.
    torch.cuda.synchronize()
    print(f"constructed and warmed up in {time.perf_counter() - started:.1f} s", flush=True)
    return engine


def row(engines: dict[str, Engine], n: int) -> dict[str, Any]:
    """Tokens a second of both at one N, one after the other."""
    speed, p99 = {}, {}
    for name, engine in engines.items():
        seconds, tpot = wave(engine, n, INPUT_LEN, greedy(OUTPUT_LEN))
        speed[name], p99[name] = n * OUTPUT_LEN / seconds, tpot * 1e3
    ratio = speed["int4"] / speed["bf16"]
    vllm = VLLM_INT4.get(n)
    print(f"N={n}: bf16 {speed['bf16']:.0f}, int4 {speed['int4']:.0f} tok/s, {ratio:.3f}", flush=True)
    return {
        "n": n,
        "tok_s": speed,
        "p99_tpot_ms": p99,
        "ratio": ratio,
        "bar": BARS.get(n),
        "vllm_int4_tok_s": vllm,
        "ratio_to_vllm": vllm and speed["int4"] / vllm,
    }


def decode_split(engine: Engine, n: int) -> dict[str, Any]:
    """A decode step's time, and what its kernels take of it, each by itself: they may overlap."""

    wall, ran = profiled_steps(engine, n)
    kernels: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    for name, start, end in ran:
        kernels[name][0] += 1
        kernels[name][1] += end - start
    busy = covered([(start, end) for _, start, end in ran]) * 1e-3 / PROFILED_STEPS
    longest = sorted(kernels.items(), key=lambda item: -item[1][1])[:KERNELS_KEPT]
    return {
        "n": n,
        "step_ms": wall * 1e3,
        "kernels_ms": busy,
        "idle_share": 1 - busy / (wall * 1e3),
        "kernels": [
            {
                "name": name[:120],
                "launches_a_step": count / PROFILED_STEPS,
                "us_a_step": microseconds / PROFILED_STEPS,
                "us_a_launch": microseconds / count,
            }
            for name, (count, microseconds) in longest
        ],
    }


def show_split(split: dict[str, Any]) -> None:
    print(
        f"\n{split['engine']} N={split['n']}: a step {split['step_ms']:.3f} ms, its kernels "
        f"{split['kernels_ms']:.3f}; idle {split['idle_share']:.1%}"
    )
    for kernel in split["kernels"]:
        time_and_count = f"{kernel['us_a_step']:>9.1f} us {kernel['launches_a_step']:>6.1f}"
        print(f"{time_and_count} x {kernel['us_a_launch']:>7.2f}  {kernel['name'][:90]}")


def show(rows: list[dict[str, Any]]) -> None:
    print(f"\n{'N':>4} {'bf16':>7} {'INT4':>7} {'ratio':>6} {'bar':>5} {'vLLM':>7} {'ratio':>6}")
    for row in rows:
        print(
            f"{row['n']:>4} {row['tok_s']['bf16']:>7.0f} {row['tok_s']['int4']:>7.0f} {row['ratio']:>6.3f} "
            f"{row['bar'] or 0:>5.2f} {row['vllm_int4_tok_s'] or 0:>7} {row['ratio_to_vllm'] or 0:>6.3f}"
        )


if __name__ == "__main__":
    main()
