"""Dequantized NVFP4 weights of a checkpoint by `fouroversix` and by `qwantize`; run by `../nvfp4_quality.py`.

fp32, a file for each solver in OUT. qwantize knows no global scale: its weights are given divided by
amax / 2688, as others store them. Its Hessian-weighted search sees the layers' inputs on the windows.

    python make_nvfp4_solvers.py MODEL OUT CALIBRATION.json
"""

import json
import sys
from pathlib import Path

import fouroversix
import qwantize
import torch
from safetensors.torch import save_file
from scalegate.tests.bench.quantization.interchange_tools.score import PACKAGES, versions
from transformers import AutoModelForCausalLM

GROUP_SIZE, LARGEST = 16, 6 * 448


def four_over_six(weight, x):
    quantized = fouroversix.quantize_to_fp4(weight)
    return fouroversix.dequantize(quantized, torch.float32, intermediate_dtype=torch.float32)


def optimal(weight, x):
    return with_global_scale(qwantize.nvfp4_optimal, weight)


def hessian(weight, x):
    return with_global_scale(qwantize.nvfp4_optimal_hessian, weight, X=x)


def with_global_scale(solve, weight, **inputs):
    scale = weight.float().abs().max() / LARGEST
    groups = (weight.float() / scale).view(weight.shape[0], -1, GROUP_SIZE)
    return solve(groups, return_dequant=True, **inputs)[2].view(weight.shape) * scale


SOLVERS = {"fouroversix": four_over_six, "qwantize": optimal, "qwantize, Hessian": hessian}

source, out, calibration = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(source, dtype="auto").eval()
linears = {
    name: module
    for name, module in model.named_modules()
    if isinstance(module, torch.nn.Linear) and name != "lm_head"
}
inputs = {name: [] for name in linears}
for name, linear in linears.items():
    linear.register_forward_pre_hook(lambda _, args, name=name: inputs[name].append(args[0].flatten(0, -2)))
with open(calibration, encoding="utf-8") as file:
    windows = json.load(file)
with torch.inference_mode():
    model(torch.tensor(windows))
    for solver, solve in SOLVERS.items():
        found = {}
        for name, linear in linears.items():
            values = solve(linear.weight.data, torch.cat(inputs[name]).float())
            found[name] = values[: linear.out_features, : linear.in_features].contiguous()
        save_file(found, Path(out) / f"{solver}.safetensors")
print(json.dumps({"solvers": list(SOLVERS), "versions": versions((*PACKAGES, "fouroversix", "qwantize"))}))
