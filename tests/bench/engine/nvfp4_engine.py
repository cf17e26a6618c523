"""The engine on NVFP4 weights beside the same engine on bf16 ones, and beside vLLM's on the same NVFP4 files.

    python -P tests/bench/engine/nvfp4_engine.py --folder /dev/shm --vllm --out OUT/nvfp4_engine.json

Qwen3-8B's shape with random weights, quantized by `scalegate.quantize`, 32 tokens in, 512 out, offline API.
Every engine is a process of its own; all are up together and take turns at every N; the figure is the better
of the repeats. vLLM, where it can be imported, reads our compressed-tensors export, with graphs of every N.
`--rival` also takes turns with IQ2_XXS in our engine; the rival check itself, over HTTP, is `rival.py`.
Exit status 1 where one of our engines compiled anything once it was warm.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scalegate.tests.bench.engine.before_after import Worker
from scalegate.tests.bench.random_qwen3 import SHAPES, random_prompts

INPUT_LEN, OUTPUT_LEN, RIVAL_LEN = 32, 512, 128
RIVAL = "iq2-xxs"
OUR_BAR, VLLM_BAR = 1.0, 1.3
"""Least ratio of our NVFP4 to our bf16, and to vLLM's NVFP4, at every N."""
CONTEXT, KV_TOKENS = 1024, 128 * 640
KV_BYTES = 14 << 30
"""For vLLM, the same number of tokens and some: given, so that it need not measure what others leave."""


def main() -> None:
    options = arguments()
    if options.worker:
        serve_worker(*options.worker, options.n)
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        plain, nvfp4 = checkpoints(options.checkpoints or Path(folder), options.model)
        sides = {"bf16": plain, "nvfp4": nvfp4} | ({"vllm": nvfp4} if options.vllm else {})
        if options.rival:
            sides[RIVAL] = checkpoints(plain.parent, options.model, RIVAL)[1]
        workers = {side: start(side, checkpoint, options) for side, checkpoint in sides.items()}
        try:
            told = {side: json.loads(worker.answer()) for side, worker in workers.items()}
            print(told, flush=True)
            compared = {side: worker for side, worker in workers.items() if side != RIVAL}
            rows = [row(compared, n, OUTPUT_LEN, options.repeats) for n in options.n]
            rivals = {side: workers[side] for side in ("nvfp4", RIVAL) if options.rival}
            rival_rows = [row(rivals, n, RIVAL_LEN, options.repeats) for n in options.rival]
            splits = [split(workers["nvfp4"], n) for n in options.split]
            ends = {side: ask(worker, "end") for side, worker in workers.items()}
        finally:
            for worker in workers.values():
                worker.process.kill()
                worker.process.wait()
    results = {
        "model": options.model,
        "workers": told,
        "rows": rows,
        "rival_rows": rival_rows,
        "decode_steps": splits,
        "at_the_end": ends,
    }
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    show(rows, rival_rows, splits)
    if any(end.get("compiled") for end in ends.values()):
        sys.exit(f"COMPILED AFTER WARM-UP: {ends}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--n", type=int, nargs="+", default=[1, 8, 16, 32, 64, 128])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--split", type=int, nargs="*", default=[1, 32, 128], help="N of the profiled steps")
    parser.add_argument("--model", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--folder", type=Path, help="where checkpoints are made, best in memory: 23 GB")
    parser.add_argument("--checkpoints", type=Path, help="where they stay, and are taken from")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rival", type=int, nargs="*", default=[], help="N at which IQ2_XXS is beside")
    parser.add_argument("--vllm", action="store_true", help="measure vLLM too")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    return parser.parse_args()


def checkpoints(folder: Path, model: str, recipe: str = "nvfp4") -> tuple[Path, Path]:
    """The model in bf16, and what `recipe` makes of it; each made where it is not there yet."""
    import torch
    from scalegate.pipeline.commands.quantize import quantize
    from scalegate.pipeline.records.artifact import MANIFEST_NAME
    from scalegate.tests.bench.engine.startup import random_checkpoint

    plain, quantized = folder / model, folder / f"{model}-{recipe}"
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if not plain.is_dir():
        started = time.perf_counter()
        random_checkpoint(plain.with_suffix(".part"), model, device).rename(plain)
        print(f"{plain.name} made in {time.perf_counter() - started:.1f} s", flush=True)
    if not (quantized / MANIFEST_NAME).is_file():
        started = time.perf_counter()
        quantize(plain, recipe, out=quantized, progress=False)
        print(f"{quantized.name} made in {time.perf_counter() - started:.1f} s", flush=True)
    if device == "cuda":
        torch.cuda.empty_cache()
    return plain, quantized


def start(side: str, checkpoint: Path, options: argparse.Namespace) -> Worker:
    command = [sys.executable, "-P", __file__, "--n", *map(str, options.n)]
    command += ["--worker", side, str(checkpoint), options.model, options.device]
    pipe = subprocess.PIPE
    return Worker(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True))


def ask(worker: Worker, what: str) -> Any:
    print(what, file=worker.process.stdin, flush=True)
    return json.loads(worker.answer())


def row(workers: dict[str, Worker], n: int, output_len: int, repeats: int) -> dict[str, Any]:
    """Tokens a second of all at one N, in turns, forwards and backwards."""
    speeds: dict[str, list[float]] = {side: [] for side in workers}
    for repeat in range(repeats):
        for side in workers if repeat % 2 == 0 else reversed(workers):
            speeds[side].append(n * output_len / ask(workers[side], f"wave {n} {output_len}"))
    best = {side: max(found) for side, found in speeds.items()}
    ratios = {f"nvfp4/{side}": best["nvfp4"] / best[side] for side in best if side != "nvfp4"}
    print(f"N={n}: {best}, {ratios}", flush=True)
    return {"n": n, "tok_s": best, "ratios": ratios, "all": speeds}


def split(worker: Worker, n: int) -> dict[str, Any]:
    return {"engine": "nvfp4", **ask(worker, f"split {n}")}


def serve_worker(side: str, checkpoint: str, model: str, device: str, ns: list[int]) -> None:
    """In the worker: says what it is once it is warm, then answers `wave N TOKENS`, `split N` and `end`."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # Whatever libraries print is no answer.
    start_engine = vllm_engine if side == "vllm" else our_engine
    described, commands = start_engine(Path(checkpoint), model, device, ns)
    print(f"={json.dumps(described)}", file=answers, flush=True)
    for line in sys.stdin:
        name, *rest = line.split()
        print(f"={json.dumps(commands[name](*map(int, rest)))}", file=answers, flush=True)


def our_engine(checkpoint: Path, model: str, device: str, ns: list[int]) -> tuple[Any, dict[str, Callable]]:
    import torch
    from scalegate.layouts.modules.linear import QuantizedLinear
    from scalegate.pipeline.model_loader.served_checkpoint import build_engine
    from scalegate.serving_check.engine.options import EngineOptions
    from scalegate.tests.bench.engine.int4_engine import decode_split
    from scalegate.tests.bench.engine.serving import greedy

    began = time.perf_counter()
    sizes = {"max_num_seqs": max(ns), "max_model_len": CONTEXT, "kv_cache_tokens": KV_TOKENS}
    engine = build_engine(checkpoint, EngineOptions(device=device, prefill_chunk=8192, **sizes))
    engine.warm_up(progress=False)
    modules = engine.runner.model.modules()
    layouts = {module.packed.layout for module in modules if isinstance(module, QuantizedLinear)}
    described = {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else device,
        "torch": torch.__version__,
        "layouts": sorted(layouts),
        "warm_after_s": time.perf_counter() - began,
    }

    def generate(prompts: list[list[int]], tokens: int) -> list[int]:
        return [len(completion.token_ids) for completion in engine.generate(prompts, greedy(tokens))]

    return described, {
        "wave": lambda n, tokens: wave(generate, random_prompts(n, INPUT_LEN, model), tokens),
        "split": lambda n: decode_split(engine, n),
        "end": lambda: {"compiled": [str(event) for event in engine.stats().compilations]},
    }


def vllm_engine(checkpoint: Path, model: str, device: str, ns: list[int]) -> tuple[Any, dict[str, Callable]]:
    import vllm
    from vllm import LLM, SamplingParams

    began = time.perf_counter()
    llm = LLM(
        model=str(checkpoint),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=CONTEXT,
        max_num_seqs=max(ns),
        max_num_batched_tokens=8192,
        enable_prefix_caching=False,
        gpu_memory_utilization=0.1,
        kv_cache_memory_bytes=KV_BYTES,
        compilation_config={"cudagraph_capture_sizes": sorted({1, 2, 4, *ns})},
    )

    def generate(prompts: list[list[int]], tokens: int) -> list[int]:
        requests = [{"prompt_token_ids": ids} for ids in prompts]
        asked = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        return [
            len(completion.outputs[0].token_ids)
            for completion in llm.generate(requests, asked, use_tqdm=False)
        ]

    described = {"vllm": vllm.__version__, "warm_after_s": time.perf_counter() - began}
    return described, {
        "wave": lambda n, tokens: wave(generate, random_prompts(n, INPUT_LEN, model), tokens),
        "end": dict,
    }


def wave(
    generate: Callable[[list[list[int]], int], list[int]], prompts: list[list[int]], output_len: int
) -> float:
    """Seconds that the prompts take together, from the first to the last token of all."""
    generate(prompts, 4)
    started = time.perf_counter()
    lengths = generate(prompts, output_len)
    seconds = time.perf_counter() - started
    if lengths != [output_len] * len(prompts):
        raise RuntimeError("tokens are missing")
    return seconds


def show(rows: list[dict[str, Any]], rival_rows: list[dict[str, Any]], splits: list[dict[str, Any]]) -> None:
    from scalegate.tests.bench.engine.int4_engine import show_split

    for split in splits:
        show_split(split)
    bars = {"nvfp4/bf16": OUR_BAR, "nvfp4/vllm": VLLM_BAR, f"nvfp4/{RIVAL}": "1 from N=4"}
    for row in rows + rival_rows:
        speeds = "  ".join(f"{side} {speed:.0f}" for side, speed in row["tok_s"].items())
        ratios = "  ".join(f"{name} {ratio:.3f} (bar {bars[name]})" for name, ratio in row["ratios"].items())
        print(f"N={row['n']:>3}: {speeds}  {ratios}")


if __name__ == "__main__":
    main()
