"""Score a checkpoint with transformers in whatever environment runs this: nats per token on given windows.

Run by `../interchange.py`. It imports nothing of Scalegate: it is another tool's reading of the checkpoint.

    python score.py MODEL WINDOWS.json
"""

import importlib.metadata
import json
import math
import sys

import torch
from transformers import AutoModelForCausalLM

PACKAGES = ("torch", "transformers", "compressed-tensors", "llmcompressor", "nvidia-modelopt", "torchao")


def nats_per_token(model, windows: list[list[int]], batch_size: int = 4) -> float:
    total, count = 0.0, 0
    with torch.inference_mode():
        for start in range(0, len(windows), batch_size):
            tokens = torch.tensor(windows[start : start + batch_size], device=model.device)
            logits = model(tokens).logits[:, :-1].float()
            losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            total += losses.item() * tokens[:, 1:].numel()
            count += tokens[:, 1:].numel()
    return total / count


def versions(packages: tuple[str, ...] = PACKAGES) -> dict[str, str]:
    installed = {dist.metadata["Name"].lower(): dist.version for dist in importlib.metadata.distributions()}
    return {name: installed[name] for name in packages if name in installed}


def report(model, windows_path: str, runtime: str) -> None:
    """Print what `../interchange.py` reads; `runtime` says in a few words what computed it."""
    with open(windows_path, encoding="utf-8") as file:
        windows = json.load(file)
    nats = nats_per_token(model, windows)
    if not math.isfinite(nats):
        raise SystemExit(f"nats per token is {nats}")
    print(json.dumps({"nats_per_token": nats, "runtime": runtime, "versions": versions()}))


if __name__ == "__main__":
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto").eval()
    report(model, sys.argv[2], "AutoModelForCausalLM.from_pretrained, as it is by default")
