"""Quantize a checkpoint with NVIDIA ModelOpt and export it; run by `../interchange.py`.

ModelOpt's exported checkpoints are for other engines, so its own runtime is the model it quantized in memory,
and that one is scored. Its simulated NVFP4 kernel needs CUDA; its compressed weights (`mtq.compress`) run on
CPU too, with activations left alone. So that is what is scored, for both schemes.

    python make_modelopt.py MODEL OUT SCHEME CALIBRATION.json WINDOWS.json     SCHEME: W4A16_NVFP4 NVFP4
"""

import copy
import json
import sys

import modelopt.torch.quantization as mtq
import torch
from modelopt.torch.export import export_hf_checkpoint
from score import report
from transformers import AutoModelForCausalLM, AutoTokenizer

source, out, scheme, calibration, windows = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(source, dtype="auto").eval()
with open(calibration, encoding="utf-8") as file:
    texts = json.load(file)


def calibrate(model) -> None:
    with torch.inference_mode():
        for tokens in texts:
            model(torch.tensor([tokens]))


if scheme == "W4A16_NVFP4":
    config = copy.deepcopy(mtq.W4A16_NVFP4_CFG)
else:
    config = copy.deepcopy(mtq.NVFP4_DEFAULT_CFG)
model = mtq.quantize(model, config, calibrate)
compressed = copy.deepcopy(model)
mtq.compress(compressed)
mtq.disable_quantizer(compressed, "*input_quantizer")
report(compressed, windows)
export_hf_checkpoint(model, export_dir=out)
AutoTokenizer.from_pretrained(source).save_pretrained(out)
