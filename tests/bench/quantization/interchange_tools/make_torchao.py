"""Quantize a checkpoint with torchao through transformers; run by `../interchange.py`.

python make_torchao.py MODEL OUT SCHEME     SCHEME: NVFP4
"""

import sys

from torchao.prototype.mx_formats import NVFP4WeightOnlyConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TorchAoConfig

source, out, scheme = sys.argv[1:]
if scheme != "NVFP4":
    raise SystemExit(f"unknown scheme {scheme}")
config = TorchAoConfig(quant_type=NVFP4WeightOnlyConfig())
model = AutoModelForCausalLM.from_pretrained(source, dtype="auto", quantization_config=config)
model.save_pretrained(out, safe_serialization=True)
AutoTokenizer.from_pretrained(source).save_pretrained(out)
