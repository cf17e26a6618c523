"""The engine on weights and inputs in FP8 beside the same on bf16 and INT4 weights: Qwen3-8B's shape.

    python -P tests/bench/engine/fp8_engine.py --out OUT/fp8_engine.json
    python -P tests/bench/engine/fp8_engine.py --engines bf16,fp8,int4-fp8 int4

The engines of a group, joined by commas, are up together, each in a process of its own, and take turns at
every N. The weights are random, packed for products merged as in a model that was loaded; the output layer
stays bf16. Exit status 1 where anything was compiled once all were warm. Not for HTTP, nor for the kernels
alone (`linear.py --format fp8`).
"""

import argparse
import json
import multiprocessing
import sys
from multiprocessing.connection import Connection
from pathlib import Path

from scalegate.layouts.formats.fp8 import BLOCKS, FP8
from scalegate.layouts.formats.int4 import Int4
from scalegate.layouts.formats.weight_format import WeightFormat

ENGINES: dict[str, tuple[str, WeightFormat] | None] = {
    "bf16": None,
    "int4": ("swap_ab", Int4(128)),
    "fp8": ("fp8_scaled", FP8()),
    "fp8-block": ("fp8_scaled", FP8(BLOCKS)),
    "int4-fp8": ("int4_fp8", Int4(128, symmetric=True, activations="fp8")),
}
"""The layout and the format of each engine's products."""
LOADS = {(32, 512): (1, 16, 64, 128), (2048, 32): (1, 16, 64)}
"""N by the lengths of prompts and answers."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", nargs="+", default=["bf16,fp8"], help=", ".join(ENGINES))
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, object]] = []
    compiled: dict[str, list[str]] = {}
    device = ""
    for group in options.engines:
        workers = {name: Worker(name) for name in group.split(",")}
        for worker in workers.values():
            device = worker.answer()
        for (inputs, outputs), counts in LOADS.items():
            for n in counts:
                speed = dict.fromkeys(workers, 0.0)
                for _ in range(options.repeats):
                    for name, worker in workers.items():
                        speed[name] = max(speed[name], worker.measure(n, inputs, outputs))
                rows.append({"load": f"{inputs}/{outputs}", "n": n, "tok_s": speed})
                told = ", ".join(f"{name} {each:.0f}" for name, each in speed.items())
                print(f"{inputs}/{outputs} N={n:<4} tok/s: {told}", flush=True)
        compiled |= {name: worker.end() for name, worker in workers.items()}
        if options.out:
            told = {"device": device, "rows": rows, "compiled": compiled}
            options.out.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    if any(compiled.values()):
        sys.exit(f"COMPILED AFTER WARM-UP: {compiled}")


class Worker:
    """A process with one engine, which is warm once it has answered with the device's name."""

    def __init__(self, name: str):
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(name, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def answer(self):
        return self.pipe.recv()

    def measure(self, n: int, inputs: int, outputs: int) -> float:
        """Tokens a second."""
        self.pipe.send((n, inputs, outputs))
        return n * outputs / self.answer()

    def end(self) -> list[str]:
        """What the engine has compiled since it was warm."""
        self.pipe.send(None)
        compiled = self.answer()
        self.process.join()
        return compiled


def serve(name: str, pipe: Connection) -> None:
    import torch
    from scalegate.tests.bench.engine.int4_engine import merged, quantized, warm_engine
    from scalegate.tests.bench.engine.serving import greedy, wave
    from scalegate.tests.bench.random_qwen3 import random_model

    model, packing = merged(random_model("qwen3-8b")), ENGINES[name]
    if packing is not None:
        model = quantized(model, *packing)
        torch.cuda.empty_cache()  # Other processes need what the bf16 weights took.
    engine = warm_engine(model)
    engine.jit_monitor.arm()
    pipe.send(torch.cuda.get_device_name())
    while (load := pipe.recv()) is not None:
        n, inputs, outputs = load
        pipe.send(wave(engine, n, inputs, greedy(outputs))[0])
    pipe.send([str(event) for event in engine.stats().compilations])


if __name__ == "__main__":
    main()
