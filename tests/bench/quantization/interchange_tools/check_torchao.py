"""Load an INT4 artifact of ours with transformers and torchao; run by `../interchange.py`.

On CPU torchao can hold these weights and not multiply by them, so what is checked is what it loaded; with
CUDA the checkpoint is scored.

    python check_torchao.py MODEL WINDOWS.json
"""

import json
import sys

import torch
from scalegate.tests.bench.quantization.interchange_tools.score import report, versions
from torchao.quantization import Int4TilePackedTo4dTensor
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto").eval()
linears = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
packed = [name for name, linear in linears.items() if isinstance(linear.weight, Int4TilePackedTo4dTensor)]
plain = [name for name in linears if name not in packed]
if torch.cuda.is_available():
    report(model.cuda(), sys.argv[2], "AutoModelForCausalLM.from_pretrained on CUDA")
else:
    print(json.dumps({"packed": len(packed), "plain": plain, "versions": versions()}))
