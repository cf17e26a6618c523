"""Score a checkpoint with vLLM: nats per token on given windows, by the logprobs of the prompts' own tokens.

Run by `../vllm_reads.py`. It imports nothing of Scalegate: it is vLLM's own reading of the checkpoint.

    python score_vllm.py MODEL WINDOWS.json
"""

import json
import math
import sys

import vllm
from vllm import LLM, SamplingParams

KV_BYTES = 1 << 30


def nats_per_token(llm: LLM, windows: list[list[int]]) -> float:
    asked = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1, detokenize=False)
    answers = llm.generate([{"prompt_token_ids": window} for window in windows], asked, use_tqdm=False)
    found = [
        scores[token].logprob
        for window, answer in zip(windows, answers, strict=True)
        for token, scores in list(zip(window, answer.prompt_logprobs, strict=True))[1:]
    ]
    return -math.fsum(found) / len(found)


def main() -> None:
    with open(sys.argv[2], encoding="utf-8") as file:
        windows = json.load(file)
    llm = LLM(
        model=sys.argv[1],
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=2 * max(map(len, windows)),
        max_num_seqs=64,
        enable_prefix_caching=False,
        gpu_memory_utilization=0.05,
        kv_cache_memory_bytes=KV_BYTES,
    )
    nats = nats_per_token(llm, windows)
    told = {"nats_per_token": nats, "runtime": "vLLM", "versions": {"vllm": vllm.__version__}}
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
