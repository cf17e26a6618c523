"""Output tokens a second of the embedded engine on the CPU, beside transformers' own continuous batching.

    python -P tests/bench/engine/engine.py --checkpoint examples/qwen3-pycode-5m

No HTTP on either side. transformers gets sdpa attention and, at each M, the best of several pool and batch
sizes, found first; then both run in turns on the same prompts, and the figure is the median of the ratios.
"""

import argparse
import copy
import os
import platform
import statistics
import time
from dataclasses import asdict
from pathlib import Path

from tqdm import tqdm

RESULTS = Path(__file__).parents[1] / "results" / "engine" / "engine.json"
BARS = {1: 1.0, 16: 1.5, 64: 3.0, 128: 3.0}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--text", type=Path, help="JSON lines with a `text`; prompts are cut from it")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--m", type=int, nargs="+", default=list(BARS))
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--input-len", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    return parser.parse_args()


def main() -> None:
    options = arguments()
    # Worker threads that other libraries start read it when they load.
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    import torch
    import transformers
    from scalegate.base.atomic_files import write_json

    torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()
    cells = []
    for dtype in options.dtypes:
        cells += measure_dtype(options, getattr(torch, dtype))
    write_json(
        options.out,
        {
            "bars": {str(m): bar for m, bar in BARS.items()},
            "settings": {
                "threads": options.threads,
                "input_len": options.input_len,
                "output_len": options.output_len,
                "repeats": options.repeats,
                "checkpoint": options.checkpoint.name,
            },
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
            },
            "cpu": cpu_name(),
            "cells": cells,
        },
    )
    print(f"{'dtype':>9} {'M':>4} {'engine':>9} {'transformers':>13} {'ratio':>6} {'bar':>5}")
    for cell in cells:
        print(
            f"{cell['dtype']:>9} {cell['m']:>4} {cell['engine_tok_s']:>9.0f} "
            f"{cell['transformers_tok_s']:>13.0f} {cell['ratio']:>6.2f} {BARS.get(cell['m'], 0):>5.1f}"
        )


def measure_dtype(options: argparse.Namespace, dtype) -> list[dict]:
    from scalegate.serving_check.engine.engine import Engine
    from scalegate.serving_check.engine.options import EngineOptions
    from scalegate.serving_check.engine.request import SamplingParams
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        options.checkpoint, dtype=dtype, attn_implementation="sdpa"
    ).eval()
    length = options.input_len + options.output_len
    most = max(options.m)
    config = EngineOptions(max_num_seqs=most, max_model_len=length, kv_cache_tokens=most * (length + 16))
    engine = Engine(copy.deepcopy(model), config, frozenset())
    engine.warm_up()
    greedy = SamplingParams(max_tokens=options.output_len, temperature=0.0, ignore_eos=True)

    def run_engine(prompts: list[list[int]]) -> float:
        started = time.perf_counter()
        completions = engine.generate(prompts, greedy)
        return sum(len(completion.token_ids) for completion in completions) / (time.perf_counter() - started)

    cells = []
    for m in options.m:
        prompts = cut_prompts(options, m)
        trial = max(options.output_len // 4, 1)  # long enough to tell the sizes apart
        sized = [(run_transformers(model, prompts, trial, size), size) for size in sizes(m, length)]
        _, best = max(sized, key=lambda pair: pair[0])
        pairs = []
        for _ in tqdm(range(options.repeats), f"{dtype} M={m}", disable=None):
            pairs.append((run_engine(prompts), run_transformers(model, prompts, options.output_len, best)))
        cells.append(
            {
                "dtype": str(dtype).removeprefix("torch."),
                "m": m,
                "engine_tok_s": statistics.median(ours for ours, _ in pairs),
                "transformers_tok_s": statistics.median(theirs for _, theirs in pairs),
                "ratio": statistics.median(ours / theirs for ours, theirs in pairs),
                "ratios": [ours / theirs for ours, theirs in pairs],
                "engine_settings": asdict(config),
                "transformers_settings": best,
                "transformers_tried": [{**settings, "tok_s": speed} for speed, settings in sized],
            }
        )
    return cells


def sizes(m: int, length: int) -> list[dict]:
    """Pools that hold all of M requests, in small and large pages, and several token budgets for a step."""
    pools = [(32, -(-length // 32) * m + 8), (256, -(-length // 256) * m + 8)]
    budgets = sorted({max(m, 64), max(m, 512), max(m, 2048)})
    return [
        {"page_size": page, "num_blocks": blocks, "max_batch_tokens": budget}
        for page, blocks in pools
        for budget in budgets
    ]


def run_transformers(model, prompts: list[list[int]], output_len: int, size: dict) -> float:
    """Tokens a second from the first request's arrival to the last one's end; start and stop excluded."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    generation = GenerationConfig(max_new_tokens=output_len, do_sample=False, eos_token_id=-1, pad_token_id=0)
    config = ContinuousBatchingConfig(**size, allow_block_sharing=False, use_cuda_graph=False)
    with model.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=config
    ) as manager:
        started = time.perf_counter()
        manager.add_requests(inputs=prompts, max_new_tokens=output_len)
        tokens, finished = 0, 0
        while finished < len(prompts):
            result = manager.get_result(timeout=60)
            if result is None:
                raise RuntimeError(f"transformers' continuous batching stopped with {size}")
            if result.is_finished():
                tokens += len(result.generated_tokens)
                finished += 1
        elapsed = time.perf_counter() - started
    if tokens != len(prompts) * output_len:
        raise RuntimeError(f"transformers gave {tokens} tokens with {size}")
    return tokens / elapsed


def cut_prompts(options: argparse.Namespace, m: int) -> list[list[int]]:
    """M different prompts of input_len tokens: from the text, or counted out where there is none."""
    if options.text is None:
        return [
            [(index * 7919 + place * 104729) % 8000 + 1 for place in range(options.input_len)]
            for index in range(m)
        ]
    import json

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.checkpoint)
    tokens: list[int] = []
    for line in options.text.read_text(encoding="utf-8").splitlines():
        tokens += tokenizer(json.loads(line)["text"])["input_ids"]
        if len(tokens) >= m * options.input_len:
            break
    return [
        tokens[start : start + options.input_len]
        for start in range(0, m * options.input_len, options.input_len)
    ]


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


if __name__ == "__main__":
    main()
