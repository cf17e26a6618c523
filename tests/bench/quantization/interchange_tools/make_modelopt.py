"""Quantize a checkpoint with NVIDIA ModelOpt, score it and export it; run by `../interchange.py`.

ModelOpt's exported checkpoints are for other engines, so its own runtime is the model it quantized in memory,
and that one is scored: as its export writes it, with one scale for linear layers that engines fuse.

    python make_modelopt.py MODEL OUT SCHEME CALIBRATION.json WINDOWS.json     SCHEME: W4A16_NVFP4 NVFP4
"""

import copy
import json
import sys

import modelopt.torch.quantization as mtq
import torch
from modelopt.torch.export import export_hf_checkpoint
from modelopt.torch.export.unified_export_hf import requantize_resmooth_fused_llm_layers
from scalegate.tests.bench.quantization.interchange_tools.modelopt_runtime import as_it_runs
from scalegate.tests.bench.quantization.interchange_tools.score import report
from transformers import AutoModelForCausalLM, AutoTokenizer

CONFIGS = {"W4A16_NVFP4": mtq.W4A16_NVFP4_CFG, "NVFP4": mtq.NVFP4_DEFAULT_CFG}

source, out, scheme, calibration, windows = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(source, dtype="auto").eval()
with open(calibration, encoding="utf-8") as file:
    texts = json.load(file)


def calibrate(model) -> None:
    with torch.inference_mode():
        for tokens in texts:
            model(torch.tensor([tokens]))


model = mtq.quantize(model, copy.deepcopy(CONFIGS[scheme]), calibrate)
requantize_resmooth_fused_llm_layers(model)
running, rounding = as_it_runs(model)
report(running, windows, f"the model quantized in memory; {rounding} layers round their activations")
export_hf_checkpoint(model, export_dir=out)
AutoTokenizer.from_pretrained(source).save_pretrained(out)
