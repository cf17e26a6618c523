"""Quantize a checkpoint to NVFP4 with NVIDIA ModelOpt, weights only; run by `../calibrated_quality.py`.

python make_modelopt_calibrated.py MODEL OUT METHOD WINDOWS.json     METHOD: max awq_lite local_hessian

Its configurations but for the first round inputs as well; here inputs stay in 16 bits. Its two rounding
kernels need CUDA: elsewhere the same arithmetic is done in torch. What it would run is written dequantized,
with what it scales inputs by multiplied into the weights.
"""

import copy
import json
import os
import sys
import time

import modelopt.torch.kernels.quantization.gemm as kernels
import modelopt.torch.quantization as mtq
import torch
from modelopt.torch.quantization.nn import TensorQuantizer, register_quant_backend
from modelopt.torch.quantization.tensor_quant import scaled_e4m3_impl
from transformers import AutoModelForCausalLM, AutoTokenizer

CONFIGS = {
    "max": mtq.W4A16_NVFP4_CFG,
    "awq_lite": mtq.NVFP4_AWQ_LITE_CFG,
    "local_hessian": mtq.NVFP4_W4A4_WEIGHT_LOCAL_HESSIAN_CFG,
}
WITHOUT_INPUTS = {"quantizer_name": "*input_quantizer", "enable": False}
E2M1_MAX, BLOCK = 6.0, 16
BACKEND = "nvfp4_in_torch"


def with_static_scales(x, amax, global_amax=None, *_, out_dtype=None):
    """What its kernel for blocks with an `amax` each gives."""
    blocks = x.reshape(amax.numel(), -1).float()
    largest = amax.float().reshape(-1, 1)
    whole = largest.max() if global_amax is None else global_amax.float()
    scale = scaled_e4m3_impl(largest / E2M1_MAX, whole / E2M1_MAX)
    magnitude = (blocks.abs() / torch.where(scale == 0, 1.0, scale)).clamp(max=E2M1_MAX)
    spacing = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    values = torch.copysign((magnitude / spacing).round() * spacing * scale, blocks)
    return values.to(out_dtype or x.dtype).view_as(x)


def with_own_scales(x, quantizer):
    """What its kernel for blocks that are scaled as they come gives."""
    whole = x.abs().amax() if quantizer.amax is None else quantizer.amax.amax()
    return with_static_scales(x, x.reshape(-1, BLOCK).abs().amax(1), whole)


torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
source, out, method, calibration = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(source, dtype="auto").eval()
with open(calibration, encoding="utf-8") as file:
    windows = json.load(file)


def read_text(model: torch.nn.Module) -> None:
    with torch.inference_mode():
        for tokens in windows:
            model(torch.tensor([tokens]))


begun, begun_cpu = time.perf_counter(), time.process_time()
config = copy.deepcopy(CONFIGS[method])
config["quant_cfg"].append(WITHOUT_INPUTS)
if not torch.cuda.is_available():
    register_quant_backend(BACKEND, with_own_scales)
    kernels.IS_AVAILABLE, kernels.static_blockwise_fp4_fake_quant = True, with_static_scales
    for entry in config["quant_cfg"]:
        if entry.get("cfg", {}).get("block_sizes", {}).get("type") == "dynamic":
            entry["cfg"]["backend"] = BACKEND
model = mtq.quantize(model, config, read_text)
spent = {"seconds": time.perf_counter() - begun, "cpu_seconds": time.process_time() - begun_cpu}
plain = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
quantized = 0
for name, module in model.named_modules():
    quantizer = getattr(module, "weight_quantizer", None)
    if not isinstance(quantizer, TensorQuantizer) or not quantizer.is_enabled:
        continue
    with torch.no_grad():
        weight = quantizer(module.weight).float()
        scale = getattr(module.input_quantizer, "pre_quant_scale", None)
        plain.get_parameter(f"{name}.weight").copy_(weight if scale is None else weight * scale.float())
    quantized += 1
print(f"{quantized} weights quantized")
plain.save_pretrained(out)
AutoTokenizer.from_pretrained(source).save_pretrained(out)
with open(os.path.join(out, "spent.json"), "w", encoding="utf-8") as file:
    json.dump(spent, file)
