"""Quantize a checkpoint with llm-compressor, as its users do; run by `../interchange.py`.

python make_llmcompressor.py MODEL OUT SCHEME CALIBRATION.json     SCHEME: W4A16 W4A16_ASYM NVFP4A16 NVFP4
"""

import json
import sys

from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier
from transformers import AutoModelForCausalLM, AutoTokenizer

source, out, scheme, calibration = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
tokenizer = AutoTokenizer.from_pretrained(source)
recipe = QuantizationModifier(targets="Linear", scheme=scheme, ignore=["lm_head"])
if scheme == "NVFP4":
    # Its activations are quantized too, which takes a few texts to find their ranges.
    with open(calibration, encoding="utf-8") as file:
        windows = json.load(file)
    data = Dataset.from_list([{"input_ids": w, "attention_mask": [1] * len(w)} for w in windows])
    oneshot(model=model, dataset=data, recipe=recipe, num_calibration_samples=len(windows))
else:
    oneshot(model=model, recipe=recipe)
model.save_pretrained(out, save_compressed=True)
tokenizer.save_pretrained(out)
