"""Log-probabilities of given tokens by vLLM, of many checkpoints one after another, on a CPU.

Run by `../served_by_vllm.py`. It imports nothing of Scalegate. Each checkpoint has a process of its own,
forked after the imports, which take most of the time.

    python vllm_log_probabilities.py PROMPTS-BY-CHECKPOINT.json OUT.jsonl
"""

import importlib
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
IMPORTED = (
    "vllm.entrypoints.llm",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.transformers",
    "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors",
)
"""What every model needs, imported once."""


def log_probabilities(artifact: str, prompts: list[list[int]]) -> list[list[float]]:
    """Of every token of each prompt but its first."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        artifact,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=max(map(len, prompts)) + 1,
        max_num_seqs=1,
        enable_prefix_caching=False,
        limit_mm_per_prompt={"image": 0, "video": 0, "audio": 0},
        disable_log_stats=True,
    )
    asked = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1, detokenize=False)
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    answers = llm.generate(given, asked, use_tqdm=False)
    return [
        [told[token].logprob for told, token in zip(answer.prompt_logprobs[1:], prompt[1:], strict=True)]
        for answer, prompt in zip(answers, prompts, strict=True)
    ]


def multiply_experts_without_amx() -> None:
    """vLLM multiplies INT4 experts on a CPU with AMX only. Without AMX, vLLM still loads them and dequantizes
    them as for its emulation on GPUs, and they are multiplied here, one after another."""
    import torch
    from torch.nn.functional import gelu, silu
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.experts.int4_emulation_moe import Int4EmulationTritonExperts
    from vllm.model_executor.layers.fused_moe.oracle import int_wna16

    if torch.cpu._is_amx_tile_supported():
        return

    def apply(self, output, hidden_states, w1, w2, topk_weights, topk_ids, activation, **_: object) -> None:
        gated = {
            MoEActivation.SILU: silu,
            MoEActivation.GELU: gelu,
            MoEActivation.GELU_TANH: lambda x: gelu(x, approximate="tanh"),
        }[activation]
        output.zero_()
        for expert in topk_ids.unique().tolist():
            tokens, slots = (topk_ids == expert).nonzero(as_tuple=True)
            gate, up = (hidden_states[tokens] @ w1[expert].T).chunk(2, dim=-1)
            weighted = (gated(gate) * up) @ w2[expert].T * topk_weights[tokens, slots, None]
            output.index_add_(0, tokens, weighted.to(output.dtype))

    Int4EmulationTritonExperts.apply = apply
    Int4EmulationTritonExperts._supports_current_device = staticmethod(lambda: True)
    int_wna16._get_priority_backends = lambda: [int_wna16.WNA16MoEBackend.EMULATION]


def main() -> None:
    given, out = sys.argv[1:]
    import vllm

    for name in IMPORTED:
        importlib.import_module(name)
    multiply_experts_without_amx()
    for artifact, prompts in json.loads(Path(given).read_text()).items():
        child = os.fork()
        if child == 0:
            line = {"artifact": artifact, "vllm": vllm.__version__}
            try:
                line["log_probabilities"] = log_probabilities(artifact, prompts)
            except BaseException as error:
                line["refused"] = f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]
            with open(out, "a") as file:
                file.write(json.dumps(line) + "\n")
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print(artifact, "done" if status == 0 else f"died, status {status}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
