"""Finding the quantization section of a checkpoint, wherever its maker put it.

What the section means is for `conventions/` and the decoders beside this file.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...base.untrusted_files import read_json_object
from ...base.untrusted_names import require_file
from .safetensors_file import TensorInfo

SECTION, OLD_SECTION = "quantization_config", "compression_config"
"""OLD_SECTION is the section's name in old versions of compressed-tensors."""
TEXT = "text_config"
MODELOPT_FILE = "hf_quant_config.json"
GPTQ_FILE, AWQ_FILE = "quantize_config.json", "quant_config.json"
"""Where AutoGPTQ and AutoAWQ put the section before transformers read it."""
MLX, MLX_SECTION = "mlx", "quantization"
FP8_DTYPES = ("torch.float8_e4m3fn", "torch.float8_e5m2")


def with_section(
    config: Mapping[str, Any], folder: Path, tensors: Mapping[str, TensorInfo]
) -> dict[str, Any]:
    """Return the config with its quantization section as `quantization_config`.

    Some multimodal checkpoints have the section in `text_config`; old GPTQ and AWQ checkpoints have it in a
    separate file. FP8 weights need no section: Mistral's `params.json` declares them for another reader.
    """
    text = config.get(TEXT)
    if config.get(SECTION) or config.get(OLD_SECTION):
        return _with_mlx_named(config)
    if isinstance(text, dict) and text.get(SECTION):
        inner = {name: value for name, value in text.items() if name != SECTION}
        return _with_mlx_named({**config, TEXT: inner, SECTION: text[SECTION]})
    section = _section_of_file(folder)
    if section is None and isinstance(config.get(MLX_SECTION), dict):
        section = {"quant_method": MLX, **config[MLX_SECTION]}
    if section is None and not (folder / MODELOPT_FILE).is_file() and _has_fp8(tensors):
        section = {"quant_method": "fp8"}
    return dict(config) if section is None else {**config, SECTION: section}


def _with_mlx_named(config: Mapping[str, Any]) -> dict[str, Any]:
    """Give MLX's quantization section, which names no method, the method `mlx`."""
    section = config.get(SECTION)
    if isinstance(section, dict) and isinstance(config.get(MLX_SECTION), dict) and "bits" in section:
        return {**config, SECTION: {"quant_method": MLX} | section}
    return dict(config)


def _section_of_file(folder: Path) -> dict[str, Any] | None:
    if (folder / GPTQ_FILE).is_file():
        return {"quant_method": "gptq", **read_json_object(require_file(folder, GPTQ_FILE))}
    if (folder / AWQ_FILE).is_file():
        return {"quant_method": "awq", **read_json_object(require_file(folder, AWQ_FILE))}
    return None


def _has_fp8(tensors: Mapping[str, TensorInfo]) -> bool:
    return any(str(info.dtype) in FP8_DTYPES for info in tensors.values())
