"""Quantize a checkpoint with llm-compressor's calibrated methods; run by `../calibrated_quality.py`.

python make_llmcompressor_calibrated.py MODEL OUT METHOD SCHEME WINDOWS.json
    METHOD: gptq awq ptq static    SCHEME: one of its presets, W4A16_ASYM    WINDOWS: lists of token ids

`ptq` and `static` round to the nearest; `static` reads the text too, for the scales of inputs.
"""

import json
import os
import sys
import time

import torch
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform.awq import AWQModifier
from transformers import AutoModelForCausalLM, AutoTokenizer

if not torch.cuda.is_available():
    # Its AWQ pins memory whatever the device, which without a GPU raises.
    torch.Tensor.pin_memory = lambda self, *_: self
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
source, out, method, scheme, calibration = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
tokenizer = AutoTokenizer.from_pretrained(source)
what = {"targets": "Linear", "scheme": scheme, "ignore": ["lm_head"]}
recipe = {
    "gptq": lambda: [GPTQModifier(**what)],
    # Its activation-aware scaling is a transform that comes before rounding to the nearest.
    "awq": lambda: [AWQModifier(duo_scaling="both"), QuantizationModifier(**what)],
    "ptq": lambda: [QuantizationModifier(**what)],
    "static": lambda: [QuantizationModifier(**what)],
}[method]()
with open(calibration, encoding="utf-8") as file:
    windows = json.load(file)
data = Dataset.from_list([{"input_ids": w, "attention_mask": [1] * len(w)} for w in windows])
begun, begun_cpu = time.perf_counter(), time.process_time()
if method == "ptq":
    oneshot(model=model, recipe=recipe)
else:
    longest = max(map(len, windows))
    oneshot(
        model=model,
        dataset=data,
        recipe=recipe,
        num_calibration_samples=len(windows),
        max_seq_length=longest,
    )
spent = {"seconds": time.perf_counter() - begun, "cpu_seconds": time.process_time() - begun_cpu}
# W4A8 would be stored a code a byte, which vLLM does not serve.
packed = {"quantization_format": "pack-quantized"} if scheme == "W4AFP8" else {}
model.save_pretrained(out, save_compressed=True, **packed)
tokenizer.save_pretrained(out)
with open(os.path.join(out, "spent.json"), "w", encoding="utf-8") as file:
    json.dump(spent, file)
