"""How each engine is started on a release: the commands that a card shows.

Only engines that read the checkpoint's convention are named; whether they are fast is for the gate to say.
"""

from dataclasses import dataclass


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
    requirement = {"compressed-tensors": " compressed-tensors", "torchao": " torchao"}.get(method or "", "")
    commands.append(
        EngineCommand(
            f"transformers (`pip install transformers{requirement}`)",
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
