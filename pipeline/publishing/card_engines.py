"""How each engine is started on a release: the commands that a card shows.

Only engines that read the checkpoint's convention are named; whether they are fast is for the gate to say.
"""

from dataclasses import dataclass

# transformers 5.23.0 takes no zero points in compressed-tensors checkpoints, whoever made them: it expects
# `weight_zero_point` in another shape. 5.17, 5.20 and 5.22 load them.
TRANSFORMERS_NEEDS = {
    "compressed-tensors": "'transformers<5.23' compressed-tensors",
    "torchao": "transformers torchao",
}


@dataclass(frozen=True)
class EngineCommand:
    title: str
    language: str
    code: str


def engines(name: str, method: str | None) -> list[EngineCommand]:
    """The engines that load `name`, a Hub id or a folder, whose quantization method is `method`."""
    commands = [EngineCommand("vLLM", "sh", f"vllm serve {name}")]
    if method != "torchao":
        commands.append(EngineCommand("SGLang", "sh", f"python -m sglang.launch_server --model-path {name}"))
    requirement = TRANSFORMERS_NEEDS.get(method or "", "transformers")
    commands.append(
        EngineCommand(
            f"transformers (`pip install {requirement}`)",
            "python",
            "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
            f'model = AutoModelForCausalLM.from_pretrained("{name}", device_map="auto")\n'
            f'tokenizer = AutoTokenizer.from_pretrained("{name}")',
        )
    )
    commands.append(
        EngineCommand("Scalegate's own server (`pip install scalegate`)", "sh", f"pipeline serve {name}")
    )
    return commands
