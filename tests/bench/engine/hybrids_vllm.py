"""vLLM for `hybrids.py`: starts, says that it is ready, and answers a line of JSON with a line of JSON.

    python -P tests/bench/engine/hybrids_vllm.py FOLDER MAX_MODEL_LEN MAX_NUM_SEQS SHARE_OF_MEMORY

FOLDER has a config.json; weights are random. vLLM is as it is by default, but for CUDA graphs of every size
of batch that is measured, and without prefix caching and tokenizer. Prompts of the gated delta rule take its
Triton kernels: FlashInfer's, its default on Hopper, compile for minutes with the first prompt.
"""

import json
import sys
import time
from typing import Any


def main() -> None:
    from vllm import LLM

    folder, max_len, most, share = sys.argv[1:]
    llm = LLM(
        model=folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=int(max_len),
        max_num_seqs=int(most),
        enable_prefix_caching=False,
        gpu_memory_utilization=float(share),
        additional_config={"gdn_prefill_backend": "triton"},
        compilation_config={"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 128]},
    )
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        generate(llm, request["prompts"], 4)
        print(json.dumps(generate(llm, request["prompts"], request["output_len"])), flush=True)


def generate(llm: Any, prompts: list[list[int]], output_len: int) -> dict[str, float]:
    from vllm import SamplingParams

    asked = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True, detokenize=False)
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    started = time.perf_counter()
    answers = llm.generate(requests, asked, use_tqdm=False)
    seconds = time.perf_counter() - started
    tokens = [answer.outputs[0].token_ids for answer in answers]
    if [len(answer) for answer in tokens] != [output_len] * len(prompts):
        raise RuntimeError("tokens are missing")
    return {"tok_s": len(prompts) * output_len / seconds, "different_tokens": len({a[-1] for a in tokens})}


if __name__ == "__main__":
    main()
