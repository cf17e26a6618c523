"""The engine on FP8 weights beside the same on bf16 ones: Qwen3-8B's shape, in decode and with long prompts.

    python -P tests/bench/engine/fp8_engine.py --out OUT/fp8_engine.json
    python -P tests/bench/engine/fp8_engine.py --scale block

All engines are up at once and take turns at every N. The weights are random, packed for products merged as in
a model that was loaded; the output layer stays bf16. Exit status 1 where anything was compiled once all were
warm. Not for HTTP, nor for the kernels alone (`linear.py --format fp8`).
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from scalegate.layouts.formats.fp8 import FP8, SCALES
from scalegate.tests.bench.engine.int4_engine import merged, quantized, warm_engine
from scalegate.tests.bench.engine.serving import greedy, wave
from scalegate.tests.bench.random_qwen3 import random_model

LOADS = {(32, 512): (1, 16, 64, 128), (2048, 32): (1, 16)}
"""N by the lengths of prompts and answers; two pools of more would not fit into 80 GB."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scale", choices=SCALES, default=SCALES[0])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    engines = {"bf16": warm_engine(merged(random_model("qwen3-8b")))}
    engines["fp8"] = warm_engine(
        quantized(merged(random_model("qwen3-8b")), "fp8_scaled", FP8(options.scale))
    )
    for engine in engines.values():
        engine.jit_monitor.arm()
    rows = []
    for (inputs, outputs), counts in LOADS.items():
        for n in counts:
            speed: dict[str, float] = {}
            for name, engine in [*engines.items()] * 2:
                seconds, _ = wave(engine, n, inputs, greedy(outputs))
                speed[name] = max(speed.get(name, 0.0), n * outputs / seconds)
            rows.append({"load": f"{inputs}/{outputs}", "n": n, "tok_s": speed})
            told = f"{speed['bf16']:8.0f} {speed['fp8']:8.0f} {speed['fp8'] / speed['bf16']:6.2f}"
            print(f"{inputs}/{outputs} N={n:<4} bf16, fp8 in tok/s, ratio: {told}", flush=True)
    compiled = {
        name: [str(event) for event in engine.stats().compilations] for name, engine in engines.items()
    }
    if options.out:
        told = {"device": torch.cuda.get_device_name(), "scale": options.scale, "rows": rows}
        options.out.write_text(json.dumps(told | {"compiled": compiled}, indent=1) + "\n", encoding="utf-8")
    if any(compiled.values()):
        sys.exit(f"COMPILED AFTER WARM-UP: {compiled}")


if __name__ == "__main__":
    main()
