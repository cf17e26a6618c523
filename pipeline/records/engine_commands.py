"""How each engine is started on a release: the commands that a card and a manifest show.

Only engines that read the checkpoint's convention are named; the gate says whether they are fast.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from ...serving_check.adapters.all_engines import ENGINES
from ...serving_check.adapters.engine import CardCommand
from ...serving_check.engine.options import UNQUANTIZED

TRANSFORMERS_NEEDS = {
    "compressed-tensors": "transformers compressed-tensors",
    "torchao": "transformers torchao",
    "mxfp4": "transformers accelerate",
}
# transformers 5.23 and 5.24 take no zero points in compressed-tensors checkpoints, whoever made them: on the
# meta device `PackedQuantizationCompressor.compress` leaves `weight_zero_point` unpacked, in another shape.
# 5.17 to 5.22 load them. compressed-tensors 0.20 cannot unpack those of a layer with eight rows; 0.19 can.
TRANSFORMERS_WITH_ZERO_POINTS = "'transformers<5.23' 'compressed-tensors<0.20'"
TRANSFORMERS, VLLM = "transformers", "vLLM"
"""The beginnings of the titles of these engines' commands."""
VLLM_FAILS = {
    "gpt_oss": "its loader of gpt-oss (0.32) skips single experts, and their weights stay uninitialized",
}
"""By model type, for packed experts in compressed-tensors; read in `GptOssModel._load_weights_other`.

gpt-oss: it takes `experts.0.w13_weight_packed`, gate and up by turns and no `weight_shape`, which neither
compressed-tensors nor transformers reads.
"""
TEXT_CLASS = "AutoModelForCausalLM"
KVARN = "kvarn_"
KVARN_ENGINE = "vLLM with KVarN (https://github.com/huawei-csl/KVarN)"


def engines(
    name: str,
    method: str | None,
    kv_format: str = UNQUANTIZED,
    auto_class: str = TEXT_CLASS,
    zero_points: bool = False,
    unread: Collection[str] = (),
) -> list[CardCommand]:
    """Return the engines that load `name`, a Hub id or a folder, with quantization method `method` and keys
    and values in `kv_format`: engines that Scalegate validates on, then others.

    auto_class: the transformers class that loads it
    unread:     engines that cannot load it
    """
    return [
        replace(
            command, title=f"{command.title}, which has no {kv_format} and keeps keys and values as they are"
        )
        if words is None
        else replace(command, code=" ".join([command.code, *words]))
        for command, words in _commands(name, method, kv_format, auto_class, zero_points)
        if not command.title.startswith(tuple(unread))
    ]


def kv_cache_commands(kv_format: str) -> dict[str, str]:
    """Return the command of each engine that supports `kv_format`, for a folder; empty for unquantized keys
    and values.
    """
    if kv_format == UNQUANTIZED:
        return {}
    return {
        command.title: " ".join([command.code, *words])
        for command, words in _commands("FOLDER", None, kv_format)
        if words is not None
    }


def _commands(
    name: str,
    method: str | None,
    kv_format: str,
    auto_class: str = TEXT_CLASS,
    zero_points: bool = False,
) -> Iterator[tuple[CardCommand, Sequence[str] | None]]:
    """Yield each command, and its words for the KV format; None if the engine does not support the format."""
    for _, engine in ENGINES.items():
        command = engine.card_command(name, method)
        if command is not None:
            yield command, engine.kv_cache_words(kv_format)
    if kv_format.startswith(KVARN):
        yield CardCommand(KVARN_ENGINE, "sh", f"vllm serve {name}"), ("--kv-cache-dtype", kv_format)
    requirement = TRANSFORMERS_NEEDS.get(method or "", "transformers")
    if zero_points:
        requirement = TRANSFORMERS_WITH_ZERO_POINTS
    code = (
        f"from transformers import {auto_class}, AutoTokenizer\n\n"
        f'model = {auto_class}.from_pretrained("{name}", device_map="auto")\n'
        f'tokenizer = AutoTokenizer.from_pretrained("{name}")'
    )
    transformers = CardCommand(f"transformers (`pip install {requirement}`)", "python", code)
    yield transformers, () if kv_format == UNQUANTIZED else None
