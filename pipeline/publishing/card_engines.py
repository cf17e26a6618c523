"""How each engine is started on a release: the commands that a card shows.

Only engines that read the checkpoint's convention are named; whether they are fast is for the gate to say.
"""

from ...serving_check.engines.all_engines import ENGINES
from ...serving_check.engines.engine import CardCommand

# transformers 5.23.0 takes no zero points in compressed-tensors checkpoints, whoever made them: it expects
# `weight_zero_point` in another shape. 5.17, 5.20 and 5.22 load them.
TRANSFORMERS_NEEDS = {
    "compressed-tensors": "'transformers<5.23' compressed-tensors",
    "torchao": "transformers torchao",
}


def engines(name: str, method: str | None) -> list[CardCommand]:
    """The engines that load `name`, a Hub id or a folder, whose quantization method is `method`: those that
    Scalegate validates on, then others."""
    said = [engine.card_command(name, method) for _, engine in ENGINES.items()]
    commands = [command for command in said if command is not None]
    if method != "torchao":
        commands.append(CardCommand("SGLang", "sh", f"python -m sglang.launch_server --model-path {name}"))
    requirement = TRANSFORMERS_NEEDS.get(method or "", "transformers")
    commands.append(
        CardCommand(
            f"transformers (`pip install {requirement}`)",
            "python",
            "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
            f'model = AutoModelForCausalLM.from_pretrained("{name}", device_map="auto")\n'
            f'tokenizer = AutoTokenizer.from_pretrained("{name}")',
        )
    )
    return commands
