"""Quantize a checkpoint with NVIDIA ModelOpt's schemes with FP8 inputs, and to MXFP4; run by
`../calibrated_quality.py`.

    python make_modelopt_eight_bits.py MODEL OUT SCHEME WINDOWS.json
        SCHEME: fp8 fp8-rows fp8-blocks w4a8-awq mxfp4-weights    WINDOWS: lists of token ids

The weights that ModelOpt would run are written dequantized. `inputs.safetensors` beside them says how the
inputs of each layer are rounded: its metadata has the kind (`token`, `block` or `tensor`), and its tensors
have what inputs are multiplied by first (`LAYER.factors`) and the largest input of the text
(`LAYER.largest`). ModelOpt does not say how inputs of its FP8 blocks are rounded; vLLM serves these
checkpoints with a scale for every 128 inputs. ModelOpt's MXFP4 kernel needs CUDA: here its own arithmetic in
torch (`MXFP4QTensor`) rounds the weights.
"""

import copy
import json
import os
import sys
import time

import modelopt.torch.quantization as mtq
import torch
from modelopt.torch.quantization.nn import TensorQuantizer, register_quant_backend
from modelopt.torch.quantization.qtensor import MXFP4QTensor
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

CONFIGS = {
    "fp8": (mtq.FP8_DEFAULT_CFG, "tensor"),
    "fp8-rows": (mtq.FP8_PER_CHANNEL_PER_TOKEN_CFG, "token"),
    "fp8-blocks": (mtq.FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG, "block"),
    "w4a8-awq": (mtq.W4A8_AWQ_BETA_CFG, "tensor"),
    "mxfp4-weights": (mtq.MXFP4_DEFAULT_CFG, None),
}
WITHOUT_INPUTS = {"quantizer_name": "*input_quantizer", "enable": False}
BACKEND, GROUP = "mxfp4_in_torch", 32


def in_torch(x, quantizer):
    """Return what ModelOpt's MXFP4 kernel gives."""
    codes, scale = MXFP4QTensor.quantize(x, GROUP)
    return codes.dequantize(dtype=x.dtype, scale=scale, block_sizes={-1: GROUP})


torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
source, out, scheme, calibration = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(source, dtype="auto").eval()
with open(calibration, encoding="utf-8") as file:
    windows = json.load(file)


def read_text(model: torch.nn.Module) -> None:
    with torch.inference_mode():
        for tokens in windows:
            model(torch.tensor([tokens]))


begun, begun_cpu = time.perf_counter(), time.process_time()
config, kind = CONFIGS[scheme]
config = copy.deepcopy(config)
if kind is None:
    register_quant_backend(BACKEND, in_torch)
    config["quant_cfg"].append(WITHOUT_INPUTS)
    for entry in config["quant_cfg"]:
        if entry["quantizer_name"] == "*weight_quantizer" and "cfg" in entry:
            entry["cfg"]["backend"] = BACKEND
model = mtq.quantize(model, config, read_text if kind == "tensor" else None)
spent = {"seconds": time.perf_counter() - begun, "cpu_seconds": time.process_time() - begun_cpu}
plain = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
inputs = {}
quantized = 0
for name, module in model.named_modules():
    quantizer = getattr(module, "weight_quantizer", None)
    # One of several quantizers in a row (INT4, then FP8) is as good as a single one here.
    if not isinstance(quantizer, torch.nn.Module) or not any(
        part.is_enabled for part in quantizer.modules() if isinstance(part, TensorQuantizer)
    ):
        continue
    with torch.no_grad():
        plain.get_parameter(f"{name}.weight").copy_(quantizer(module.weight.float()))
    quantized += 1
    factors = getattr(module.input_quantizer, "pre_quant_scale", None)
    if factors is not None:
        inputs[f"{name}.factors"] = factors.float().reshape(-1)
    if kind == "tensor":
        inputs[f"{name}.largest"] = module.input_quantizer.amax.float().reshape(())
    elif kind is not None:
        inputs[f"{name}.largest"] = torch.zeros(())
print(f"{quantized} weights quantized")
plain.save_pretrained(out)
AutoTokenizer.from_pretrained(source).save_pretrained(out)
if kind is not None:
    save_file(inputs, os.path.join(out, "inputs.safetensors"), {"kind": kind})
with open(os.path.join(out, "spent.json"), "w", encoding="utf-8") as file:
    json.dump(spent, file)
