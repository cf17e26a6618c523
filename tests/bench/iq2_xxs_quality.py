"""IQ2_XXS quality: with and without importance, beside round-to-nearest at two bits; relative L2, extra nats.

    python -P tests/bench/iq2_xxs_quality.py CHECKPOINT... --heldout heldout.jsonl \
        --calibration calibration.jsonl --out tests/bench/results/iq2_xxs_quality.json

Ours goes the whole way: `quantize` writes an artifact, `write_gguf` a GGUF file, and evaluated is what the
`gguf` package makes of that file, which has to be, bit for bit, what our convention reads. Round-to-nearest
has groups of 32 or 128 with fp16 scale and minimum. All linears but lm_head; float32, windows of `--context`.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
import transformers
from gguf import GGUFReader
from gguf.quants import dequantize
from scalegate.pipeline.checkpoints.checkpoint import open_checkpoint
from scalegate.pipeline.conventions.all_conventions import convention_of
from scalegate.pipeline.gguf_file.architecture import Architecture
from scalegate.pipeline.gguf_file.write import write_gguf
from scalegate.pipeline.quantize import quantize
from scalegate.serving_check.quality import read_texts, score, token_windows
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from quality import relative_l2

LEVELS = 3


def by_way_of_gguf(checkpoint: Path, calibration: Path | None) -> tuple[dict[str, Tensor], bool]:
    """What `gguf` makes of our file, and whether our convention reads the same bits."""
    with tempfile.TemporaryDirectory() as folder:
        quantize(checkpoint, "iq2-xxs", folder, calibration=calibration, device="cpu", progress=False)
        artifact = open_checkpoint(folder)
        stored = convention_of(artifact).modules(artifact)
        file = write_gguf(artifact, Path(folder) / "model.gguf", progress=False)
        tensors = {tensor.name: tensor for tensor in GGUFReader(file.path).tensors}
        names = Architecture.of(artifact.source, artifact.config)
        weights, same = {}, True
        for module, one in stored.items():
            tensor = tensors[names.tensor_name(f"{module}.weight")]
            weights[module] = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type))
            same &= torch.equal(weights[module], one.read().dequantize(torch.float32))
        return weights, same


def rounded_to_nearest(weights: Mapping[str, Tensor], group: int) -> dict[str, Tensor]:
    made = {}
    for name, weight in weights.items():
        groups = weight.float().view(-1, group)
        low = groups.amin(1, keepdim=True).half().float()
        step = ((groups.amax(1, keepdim=True) - low) / LEVELS).half().float().clamp(min=1e-8)
        codes = ((groups - low) / step).round().clamp(0, LEVELS)
        made[name] = (codes * step + low).view(weight.shape)
    return made


def measure(checkpoint: Path, heldout: Path, calibration: Path, context: int, tokens: int | None) -> dict:
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    windows = token_windows(tokenizer, read_texts(heldout), context, tokens)
    stored = open_checkpoint(checkpoint)
    original = score(model, windows).nats_per_token
    plain, same = by_way_of_gguf(checkpoint, None)
    weighted, also = by_way_of_gguf(checkpoint, calibration)
    weights = {name: stored.read(f"{name}.weight") for name in plain}
    cells = []
    for solver, bits, changed in (
        ("IQ2_XXS", 2.0625, plain),
        ("IQ2_XXS, importance", 2.0625, weighted),
        ("round to nearest, 2 bits, g32", 3.0, rounded_to_nearest(weights, 32)),
        ("round to nearest, 2 bits, g128", 2.25, rounded_to_nearest(weights, 128)),
    ):
        for name, value in changed.items():
            model.get_submodule(name).weight.data.copy_(value)
        extra = score(model, windows).nats_per_token - original
        cells.append(
            {
                "solver": solver,
                "bits_per_weight": bits,
                "relative_l2": relative_l2(weights, changed),
                "extra_nats_per_token": extra,
            }
        )
        print(f"{checkpoint.name} {cells[-1]}", flush=True)
    return {
        "checkpoint": checkpoint.name,
        "tokens": sum(len(window) for window in windows),
        "nats_per_token": original,
        "gguf_reads_our_bits": same and also,
        "cells": cells,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoints", nargs="+", type=Path)
    parser.add_argument("--heldout", type=Path, required=True)
    parser.add_argument("--calibration", type=Path, required=True)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--tokens", type=int, help="of the held-out text at most")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    results = [
        measure(path, arguments.heldout, arguments.calibration, arguments.context, arguments.tokens)
        for path in arguments.checkpoints
    ]
    if arguments.out:
        report = {"context": arguments.context, "evaluated_in": "float32", "torch": torch.__version__}
        arguments.out.write_text(json.dumps(report | {"results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
