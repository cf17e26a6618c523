"""Quantize a checkpoint with auto-round, `auto-round-best` settings; run by `../calibrated_quality.py`.

python make_autoround.py MODEL OUT WINDOWS.json

It writes the weights as it would serve them, dequantized: asymmetric INT4 in groups of 128.
"""

import json
import os
import sys
import time

import torch
from auto_round import AutoRound
from transformers import AutoModelForCausalLM, AutoTokenizer

BEST = {"iters": 1000, "nsamples": 512, "low_gpu_mem_usage": False}

torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
source, out, calibration = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
tokenizer = AutoTokenizer.from_pretrained(source)
with open(calibration, encoding="utf-8") as file:
    windows = json.load(file)
length = min(map(len, windows))
data = [{"input_ids": torch.tensor([w[:length]]), "attention_mask": torch.ones(1, length)} for w in windows]
begun, begun_cpu = time.perf_counter(), time.process_time()
rounding = AutoRound(
    model,
    tokenizer,
    scheme="W4A16",
    sym=False,
    group_size=128,
    dataset=data,
    seqlen=length,
    batch_size=8,
    device_map="cpu",
    **(BEST | {"nsamples": min(BEST["nsamples"], len(data))}),
)
rounding.quantize_and_save(out, format="fake")
spent = {"seconds": time.perf_counter() - begun, "cpu_seconds": time.process_time() - begun_cpu}
# It writes into a folder of its own inside the one that it is given.
for inner in [entry.path for entry in os.scandir(out) if entry.is_dir()]:
    for name in os.listdir(inner):
        os.replace(os.path.join(inner, name), os.path.join(out, name))
    os.rmdir(inner)
with open(os.path.join(out, "spent.json"), "w", encoding="utf-8") as file:
    json.dump(spent, file)
