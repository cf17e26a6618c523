"""How layers for few tokens are best compiled: each way in a process and with caches of its own.

    python -P tests/bench/kernels/tunings.py --model qwen3-4b --rounds 2 --out OUT/tunings.json

Inductor picks a kernel's block sizes by timing each once on the tokens that layers are traced with, where a
microsecond decides, and what it picks for queries and keys differs from start to start. So a way is tried in
several rounds: one that is good on average and lands elsewhere every time is no good.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

BATCHES = (1, 16, 128)
WAYS: dict[str, dict] = {
    "as it is": {},
    "no programmatic dependent launch": {"pdl": False},
    "heads' norms in several forms": {"options": {}},
    "the same, traced with 3 tokens": {"options": {}, "traced_tokens": 3},
    "one kernel for queries, one for keys": {
        "options": {"triton.persistent_reductions": False, "combo_kernels": False},
    },
    "all candidates": {"options": {"max_autotune_pointwise": True, "coordinate_descent_tuning": True}},
}
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="qwen3-4b", help="a name in random_qwen3.py")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", choices=WAYS, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = arguments()
    if options.child is not None:
        print(json.dumps(step_milliseconds(options.model, WAYS[options.child])))
        return
    found: dict[str, list[dict[str, float]]] = {way: [] for way in options.ways}
    for _ in range(options.rounds):
        for way in options.ways:
            found[way].append(in_a_process(options.model, way))
            print(f"{way:<40}" + "".join(f"N={n}: {ms:7.3f} ms  " for n, ms in found[way][-1].items()))
            if options.out is not None:
                options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print("\nmedians")
    for way, rounds in found.items():
        medians = (statistics.median(turn[n] for turn in rounds) for n in rounds[0])
        print(f"{way:<40}" + "".join(f"{ms:10.3f}" for ms in medians))


def in_a_process(model: str, way: str) -> dict[str, float]:
    command = [sys.executable, "-P", __file__, "--model", model, "--child", way]
    with tempfile.TemporaryDirectory() as folder:
        caches = {name: f"{folder}/{name.lower()}" for name in CACHES}
        done = subprocess.run(
            command, env={**os.environ, **caches}, stdout=subprocess.PIPE, text=True, check=True
        )
    return json.loads(done.stdout.splitlines()[-1])


def step_milliseconds(model_name: str, way: dict) -> dict[str, float]:
    """Decode steps at contexts of some 300 tokens, by the number of requests."""
    from scalegate.serving_check.engine import forward
    from scalegate.serving_check.engine.compiling import compiled_layers
    from scalegate.serving_check.engine.engine import Engine
    from scalegate.serving_check.engine.options import EngineOptions
    from scalegate.tests.bench.engine import serving
    from scalegate.tests.bench.random_qwen3 import random_model

    tunings = (replace(compiled_layers.TUNINGS[0], **way), *compiled_layers.TUNINGS[1:])
    compiled_layers.TUNINGS = forward.TUNINGS = tunings
    sizes = EngineOptions(max_num_seqs=max(BATCHES), max_model_len=1024, kv_cache_tokens=100_000)
    engine = Engine(random_model(model_name), sizes, frozenset())
    engine.warm_up(progress=False)
    found = {}
    for n in BATCHES:
        serving.start_decoding(engine, n, 256, 400)
        for _ in range(serving.SETTLING_STEPS):
            engine.step()
        times = [serving.timed(lambda: [engine.step() for _ in range(20)]) / 20 for _ in range(5)]
        found[str(n)] = statistics.median(times) * 1e3
        for index in range(n):
            engine.abort(f"stream-{index}")
        serving.finish(engine)
    return found


if __name__ == "__main__":
    main()
