"""Reading prompts on a CPU: a quantized checkpoint beside an unquantized one, in turn, in one process.

    python -P tests/bench/engine/cpu_prompts.py BF16 QUANTIZED [--tokens 512 2048] [--threads 1]

Each turn reads one prompt and draws one token. The figure is the process's CPU time, of which the smallest of
all turns counts, so other load on the machine hardly shows. Prints milliseconds and their ratio.
"""

import argparse
import time
from typing import Any

import torch
from scalegate.pipeline.commands.llm import LLM
from scalegate.pipeline.machine.cores import model_threads
from scalegate.serving_check.engine.request import SamplingParams

LEAST_TURNS = 5


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bf16")
    parser.add_argument("quantized")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--threads", type=int, default=model_threads(), help="as many as a server takes")
    parser.add_argument("--seconds", type=float, default=20.0, help="for each length")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with (
        LLM(options.bf16, progress=False, max_num_seqs=1) as unquantized,
        LLM(options.quantized, progress=False, max_num_seqs=1) as quantized,
    ):
        engines = [unquantized._engine, quantized._engine]
        for tokens in options.tokens:
            best = [float("inf")] * len(engines)
            deadline, turns = time.monotonic() + options.seconds, 0
            while turns < LEAST_TURNS or time.monotonic() < deadline:
                turns += 1
                for index, engine in enumerate(engines):
                    best[index] = min(best[index], seconds_of_prompt(engine, tokens - 1, turns))
            before, after = (1000 * seconds for seconds in best)
            print(f"{tokens} tokens, {turns} turns: bf16 {before:.1f} ms, quantized {after:.1f} ms, ", end="")
            print(f"{before / after:.3f}x", flush=True)


def seconds_of_prompt(engine: Any, tokens: int, turn: int) -> float:
    """Prompts differ from turn to turn, so that no page of an earlier one is used again."""
    prompt = [(7 * index + turn) % 1000 for index in range(tokens)]
    engine.add_request("r", prompt, SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True))
    start = time.process_time()
    while engine.has_work:
        engine.step()
    return time.process_time() - start


if __name__ == "__main__":
    main()
