"""Score an NVFP4 artifact of ours as ModelOpt dequantizes it; run by `../interchange.py`.

ModelOpt exports checkpoints for other engines and loads none, so its part here is what is its own: how it
converts the sidecar to a config, and the arithmetic of `NVFP4QTensor` on the stored tensors.

    python check_modelopt.py MODEL WINDOWS.json
"""

import json
import sys
from pathlib import Path

import torch
from modelopt.torch.export.convert_hf_config import convert_hf_quant_config_format
from modelopt.torch.quantization.qtensor import NVFP4QTensor
from safetensors.torch import load_file
from scalegate.tests.bench.quantization.interchange_tools.score import report
from transformers import AutoConfig, AutoModelForCausalLM

GLOBAL_SCALE, GROUP_SIZE = ".weight_scale_2", 16

folder = Path(sys.argv[1])
sidecar = json.loads((folder / "hf_quant_config.json").read_text())
config = json.loads((folder / "config.json").read_text())["quantization_config"]
converted = convert_hf_quant_config_format(sidecar)
differing = [key for key in converted if converted[key] != config.get(key)]
if differing:
    raise SystemExit(f"ModelOpt makes another {differing} of hf_quant_config.json than config.json says")


def rounded(input_scale):
    """A hook that rounds a layer's input to NVFP4 under the stored scale, as ModelOpt does."""

    def hook(_, args):
        codes, scale, _ = NVFP4QTensor.quantize(args[0], GROUP_SIZE, weights_scaling_factor_2=input_scale)
        return codes.dequantize(scale=scale, double_scale=input_scale, block_sizes={-1: GROUP_SIZE})

    return hook


tensors: dict[str, torch.Tensor] = {}
for file in folder.glob("*.safetensors"):
    tensors |= load_file(file)
modules = [name.removesuffix(GLOBAL_SCALE) for name in tensors if name.endswith(GLOBAL_SCALE)]
for module in modules:
    packed = tensors.pop(f"{module}.weight")
    scale, double_scale = tensors.pop(f"{module}.weight_scale"), tensors.pop(module + GLOBAL_SCALE)
    shape = torch.Size((packed.shape[0], packed.shape[1] * 2))
    stored = NVFP4QTensor(shape, torch.bfloat16, packed)
    tensors[f"{module}.weight"] = stored.dequantize(
        scale=scale, double_scale=double_scale, block_sizes={-1: GROUP_SIZE}
    )
inputs = {module: tensors.pop(f"{module}.input_scale", None) for module in modules}
plain = AutoConfig.from_pretrained(folder)
del plain.quantization_config
model = AutoModelForCausalLM.from_config(plain, dtype=torch.bfloat16).eval()
missing, unexpected = model.load_state_dict(tensors, strict=False)
if unexpected or [name for name in missing if name != "lm_head.weight"]:
    raise SystemExit(f"missing {missing}, unexpected {unexpected}")
model.tie_weights()
for module, input_scale in inputs.items():
    if input_scale is not None:
        model.get_submodule(module).register_forward_pre_hook(rounded(input_scale))
rounding = sum(scale is not None for scale in inputs.values())
report(model, sys.argv[2], f"NVFP4QTensor on {len(modules)} layers, and on the inputs of {rounding}")
