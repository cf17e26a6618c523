"""vLLM's speed on the model of `moe.py`, offline, with dummy weights; the last line it prints is JSON.

    python -P tests/bench/engine/moe_vllm.py --n 1 8 32 64 128

vLLM at its best for this: CUDA graphs of every batch size that is measured, no prefix caching, no tokenizer.
Run in an environment that has vLLM; `moe.py --vllm` starts it.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from scalegate.tests.bench.random_qwen3 import SHAPES, random_prompts

MODEL = "qwen3-30b-a3b-8-layers"
INPUT_LEN, OUTPUT_LEN = 32, 512


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--n", type=int, nargs="+", default=[1, 8, 32, 64, 128])
    parser.add_argument("--repeats", type=int, default=2)
    options = parser.parse_args()
    rows = measure(options.n, options.repeats)
    print(json.dumps(rows))


def measure(ns: list[int], repeats: int) -> list[dict[str, float]]:
    from vllm import LLM, SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=OUTPUT_LEN, ignore_eos=True, detokenize=False)
    short = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True, detokenize=False)
    with tempfile.TemporaryDirectory() as folder:
        config = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "dtype": "bfloat16"}
        config |= {"hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e6, "decoder_sparse_step": 1}
        config |= {"mlp_only_layers": [], "attention_bias": False, **SHAPES[MODEL]}
        (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        llm = LLM(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=1024,
            max_num_seqs=max(ns),
            enable_prefix_caching=False,
            gpu_memory_utilization=0.6,
            compilation_config={"cudagraph_capture_sizes": sorted({1, 2, 4, 8, 16, 32, 64, *ns})},
        )

        def generate(n: int, params: SamplingParams) -> tuple[float, int]:
            requests = [{"prompt_token_ids": ids} for ids in random_prompts(n, INPUT_LEN, MODEL)]
            started = time.perf_counter()
            answers = llm.generate(requests, params, use_tqdm=False)
            seconds = time.perf_counter() - started
            tokens = [answer.outputs[0].token_ids for answer in answers]
            if [len(token) for token in tokens] != [params.max_tokens] * n:
                raise RuntimeError("tokens are missing")
            return seconds, len({token[-1] for token in tokens})

        rows = []
        for n in ns:
            _, different = generate(n, short)
            best = min(generate(n, sampling)[0] for _ in range(repeats))
            rows.append({"n": n, "tok_s": n * OUTPUT_LEN / best, "different_tokens": different})
            print(rows[-1], file=sys.stderr, flush=True)
    return rows


if __name__ == "__main__":
    main()
