"""The engine on FP8 and W4A8 beside bf16, INT4 and vLLM's FP8: Qwen3-8B's shape, all in one call.

    python -P tests/bench/engine/fp8_engine.py --out OUT/fp8_engine.json
    python -P tests/bench/engine/fp8_engine.py --engines fp8,int4-fp8,vllm-fp8 bf16,int4 --vllm FOLDER

The engines of a group, joined by commas, are up together, each in a process of its own, and take turns at
every N. Meanwhile the next groups' kernels are compiled on a model of three layers. The weights are random,
packed for products merged as in a model that was loaded; the output layer stays bf16. `vllm-fp8` is vLLM with
dummy weights, quantized as it loads them, from the packages in FOLDER. All have keys and values for as many
tokens. Exit status 1 where anything of ours was compiled once all were warm. Not for HTTP, nor for the
kernels alone (`linear.py --format fp8`).
"""

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

from scalegate.layouts.formats.fp8 import BLOCKS, FP8
from scalegate.layouts.formats.int4 import Int4
from scalegate.layouts.formats.weight_format import WeightFormat
from scalegate.tests.bench.random_qwen3 import SHAPES, random_model, random_prompts

MODEL, FEW_LAYERS = "qwen3-8b", "qwen3-8b-3-layers"
VLLM = "vllm-fp8"
ENGINES: dict[str, tuple[str, WeightFormat] | None] = {
    "bf16": None,
    "int4": ("swap_ab", Int4(128)),
    "fp8": ("fp8_scaled", FP8()),
    "fp8-block": ("fp8_scaled", FP8(BLOCKS)),
    "int4-fp8": ("int4_fp8", Int4(128, symmetric=True, activations="fp8")),
    VLLM: None,
}
"""The layout and the format of each engine's products."""
LONG_PROMPTS, LONG_ANSWERS = (2048, 32), (32, 512)
LOADS = {LONG_PROMPTS: (1, 16, 64, 128), LONG_ANSWERS: (1, 16, 64, 128)}
"""N by the lengths of prompts and answers."""
ONLY_LONG_ANSWERS = ("int4",)
"""Engines whose products of many rows are those of bf16."""
WARMED = 16
"""Requests of four tokens before a load is timed."""
MOST, KV_TOKENS, VLLM_PREFILL = 128, 128 * (32 + 512 + 16), 16384
"""Requests at a time; tokens of keys and values, as in `warm_engine`; prompt tokens in a step of vLLM's."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", nargs="+", default=["bf16,fp8"], help=", ".join(ENGINES))
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--vllm", type=Path, help="the folder of vLLM's packages")
    parser.add_argument("--start-limit", type=float, default=300, help="seconds; a later engine is left out")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, object]] = []
    compiled: dict[str, list[str]] = {}
    absent: list[str] = []
    for index, group in enumerate(options.engines):
        workers = {name: Worker(name, MODEL, options.vllm) for name in group.split(",")}
        ahead = [name for later in options.engines[index + 1 :] for name in later.split(",") if name != VLLM]
        short_lived = [Worker(name, FEW_LAYERS) for name in ahead] if index == 0 else []
        deadline = time.monotonic() + options.start_limit
        for worker in short_lived:
            if worker.is_ready(deadline):
                worker.end()
        for name in [name for name, worker in workers.items() if not worker.is_ready(deadline)]:
            print(f"{name} did not start in {options.start_limit:.0f} s", flush=True)
            workers.pop(name).process.kill()
            absent.append(name)
        for (inputs, outputs), counts in LOADS.items():
            mine = [
                name for name in workers if (inputs, outputs) == LONG_ANSWERS or name not in ONLY_LONG_ANSWERS
            ]
            for n in counts:
                speed = dict.fromkeys(mine, 0.0)
                for _ in range(options.repeats):
                    for name in mine:
                        speed[name] = max(speed[name], workers[name].measure(n, inputs, outputs))
                rows.append({"load": f"{inputs}/{outputs}", "n": n, "tok_s": speed})
                told = ", ".join(f"{name} {each:.0f}" for name, each in speed.items())
                print(f"{inputs}/{outputs} N={n:<4} tok/s: {told}", flush=True)
                if options.out:
                    options.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        compiled |= {name: worker.end() for name, worker in workers.items()}
    if absent or any(compiled.values()):
        sys.exit(f"DID NOT START: {absent}; COMPILED AFTER WARM-UP: {compiled}")


class Worker:
    """A process with one engine, which is warm once it has answered with the seconds that it took."""

    def __init__(self, name: str, model: str, vllm: Path | None = None):
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        work = serve_vllm if name == VLLM else serve
        # Not a daemon, which could have no processes of its own, as vLLM has.
        self.process = context.Process(target=work, args=(name, model, theirs, vllm))
        self.process.start()
        self.name = f"{name} {model}"
        theirs.close()

    def is_ready(self, deadline: float) -> bool:
        if not self.pipe.poll(max(0.0, deadline - time.monotonic())):
            return False
        try:
            print(f"{self.name}: warm after {self.pipe.recv():.0f} s", flush=True)
        except EOFError:  # It has failed, and its process has said why.
            return False
        return True

    def measure(self, n: int, inputs: int, outputs: int) -> float:
        """Tokens a second."""
        self.pipe.send((n, inputs, outputs))
        return n * outputs / self.pipe.recv()

    def end(self) -> list[str]:
        """What the engine has compiled since it was warm."""
        self.pipe.send(None)
        compiled = self.pipe.recv()
        self.process.join()
        return compiled


def serve(name: str, shape: str, pipe: Connection, vllm: None) -> None:
    import torch
    from scalegate.tests.bench.engine.int4_engine import merged, quantized, warm_engine
    from scalegate.tests.bench.engine.serving import greedy, prompts, timed_wave

    started = time.monotonic()
    model, packing = merged(random_model(shape)), ENGINES[name]
    if packing is not None:
        model = quantized(model, *packing)
        torch.cuda.empty_cache()  # Other processes need what the bf16 weights took.
    engine = warm_engine(model)
    engine.jit_monitor.arm()
    pipe.send(time.monotonic() - started)
    while (load := pipe.recv()) is not None:
        n, inputs, outputs = load
        engine.generate(prompts(min(n, WARMED), inputs), greedy(4))
        pipe.send(timed_wave(engine, n, inputs, greedy(outputs))[0])
    pipe.send([str(event) for event in engine.stats().compilations])


def serve_vllm(name: str, shape: str, pipe: Connection, packages: Path | None) -> None:
    started = time.monotonic()
    if packages is not None:
        sys.path.insert(0, str(packages))
        os.environ["PYTHONPATH"] = os.pathsep.join([str(packages), os.environ.get("PYTHONPATH", "")])
    from vllm import LLM, SamplingParams

    sizes = SHAPES[shape]
    of_token = 2 * 2 * sizes["num_hidden_layers"] * sizes["num_key_value_heads"] * sizes["head_dim"]
    with tempfile.TemporaryDirectory() as folder:
        config = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "dtype": "bfloat16"}
        config |= {"hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e6, "attention_bias": False}
        (Path(folder) / "config.json").write_text(json.dumps(config | sizes), encoding="utf-8")
        llm = LLM(
            model=folder,
            load_format="dummy",
            quantization="fp8",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=4096,
            max_num_seqs=MOST,
            max_num_batched_tokens=VLLM_PREFILL,
            enable_prefix_caching=False,
            gpu_memory_utilization=0.1,  # kv_cache_memory_bytes decides
            kv_cache_memory_bytes=KV_TOKENS * of_token,
            disable_log_stats=True,
            compilation_config={"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 128]},
        )

    def answer(n: int, inputs: int, outputs: int) -> float:
        """Seconds."""
        asked = SamplingParams(temperature=0.0, max_tokens=outputs, ignore_eos=True, detokenize=False)
        requests = [{"prompt_token_ids": ids} for ids in random_prompts(n, inputs, shape)]
        begun = time.perf_counter()
        answers = llm.generate(requests, asked, use_tqdm=False)
        seconds = time.perf_counter() - begun
        if [len(each.outputs[0].token_ids) for each in answers] != [outputs] * n:
            raise RuntimeError("tokens are missing")
        return seconds

    answer(MOST, 32, 4)
    pipe.send(time.monotonic() - started)
    while (load := pipe.recv()) is not None:
        n, inputs, _ = load
        answer(min(n, WARMED), inputs, 4)
        pipe.send(answer(*load))
    pipe.send([])


if __name__ == "__main__":
    main()
