"""IQ2_XXS quality: importance of three kinds, beside round-to-nearest at two bits; relative L2, extra nats.

    python -P tests/bench/quantization/iq2_xxs_quality.py CHECKPOINT... --heldout heldout.jsonl \
        --calibration calibration.jsonl --out OUT/iq2_xxs_quality.json

Ours goes the whole way: `quantize` writes an artifact, `write_gguf` a GGUF file, and evaluated is what the
`gguf` package makes of that file, which has to be, bit for bit, what our convention reads. Round-to-nearest
has groups of 32 or 128 with fp16 scale and minimum. All linears but lm_head; float32, windows of `--context`.
`--out` is written cell by cell; what it has of the same text is not measured again.
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from gguf import GGUFReader
from gguf.quants import dequantize
from scalegate.base.atomic_files import write_json
from scalegate.layouts.formats.iq2_xxs import IQ2XXS
from scalegate.pipeline.checkpoints.checkpoint import open_checkpoint
from scalegate.pipeline.commands.quantize import quantize
from scalegate.pipeline.conventions.all_conventions import convention_of
from scalegate.pipeline.gguf_file.architecture import Architecture
from scalegate.pipeline.gguf_file.write import write_gguf
from scalegate.pipeline.quantization.quantizers.iq2_xxs_search import quantize_iq2_xxs
from scalegate.serving_check.quality import read_texts, token_windows
from scalegate.tests.bench.quantization.model_nats import nats_per_token
from scalegate.tests.bench.quantization.quality import relative_l2
from torch import Tensor, nn

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
        for module, weight in stored.items():
            tensor = tensors[names.tensor_name(f"{module}.weight")]
            weights[module] = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type))
            same &= torch.equal(weights[module], weight.read().dequantize(torch.float32))
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


def alike(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """By our quantizer with all inputs of equal importance."""
    spec = IQ2XXS()
    return {
        name: quantize_iq2_xxs(weight, spec).weight.dequantize(torch.float32)
        for name, weight in weights.items()
    }


Changed = tuple[dict[str, Tensor], bool | None]
"""The weights of a cell, and for ours whether `gguf` reads our bits."""


def solvers(
    checkpoint: Path, weights: Mapping[str, Tensor], calibration: Path
) -> dict[str, tuple[float, Callable[[], Changed]]]:
    """By name, bits a weight and how to make it."""
    return {
        "IQ2_XXS, importance from weights": (2.0625, lambda: by_way_of_gguf(checkpoint, None)),
        "IQ2_XXS, importance from text": (2.0625, lambda: by_way_of_gguf(checkpoint, calibration)),
        "IQ2_XXS, all inputs alike": (2.0625, lambda: (alike(weights), None)),
        "round to nearest, 2 bits, g32": (3.0, lambda: (rounded_to_nearest(weights, 32), None)),
        "round to nearest, 2 bits, g128": (2.25, lambda: (rounded_to_nearest(weights, 128), None)),
    }


def linear_weights(model: nn.Module, checkpoint: Path) -> dict[str, Tensor]:
    stored = open_checkpoint(checkpoint)
    names = [
        name for name, module in model.named_modules() if isinstance(module, nn.Linear) and name != "lm_head"
    ]
    return {name: stored.read(f"{name}.weight") for name in names}


def measure(
    result: dict[str, Any],
    checkpoint: Path,
    windows: Sequence[Tensor],
    calibration: Path,
    save: Callable[[], None],
) -> None:
    """Fill in what `result` lacks, a cell at a time."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    weights = linear_weights(model, checkpoint)
    model.to(device)
    windows = [window.to(device) for window in windows]
    if "nats_per_token" not in result:
        result["nats_per_token"] = nats_per_token(model, windows)
        save()
    for name, (bits, make) in solvers(checkpoint, weights, calibration).items():
        if name in result["cells"]:
            continue
        changed, same = make()
        for module, value in changed.items():
            model.get_submodule(module).weight.data.copy_(value)
        cell = {
            "bits_per_weight": bits,
            "relative_l2": relative_l2(weights, changed),
            "extra_nats_per_token": nats_per_token(model, windows) - result["nats_per_token"],
        }
        result["cells"][name] = cell if same is None else cell | {"gguf_reads_our_bits": same}
        print(f"{checkpoint.name} {name}: {cell}", flush=True)
        save()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoints", nargs="+", type=Path)
    parser.add_argument("--heldout", type=Path, required=True)
    parser.add_argument("--calibration", type=Path, required=True)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--tokens", type=int, help="of the held-out text at most")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    report: dict[str, Any] = {"context": arguments.context, "evaluated_in": "float32", "results": {}}
    if arguments.out.exists():
        before = json.loads(arguments.out.read_text())
        if before["context"] == arguments.context and isinstance(before["results"], dict):
            report = before
    for path in arguments.checkpoints:
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        windows = token_windows(tokenizer, read_texts(arguments.heldout), arguments.context, arguments.tokens)
        tokens = sum(len(window) for window in windows)
        if report["results"].get(path.name, {}).get("tokens") != tokens:
            report["results"][path.name] = {"tokens": tokens, "cells": {}}
        measure(
            report["results"][path.name], path, windows, arguments.calibration,
            lambda: write_json(arguments.out, report),
        )  # fmt: skip


if __name__ == "__main__":
    main()
