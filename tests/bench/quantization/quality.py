"""INT4 quality of our solver beside torchao's fractional HQQ: relative L2 and extra nats per token.

    python -P tests/bench/quantization/quality.py CHECKPOINT... --heldout heldout.jsonl --out OUT/quality.json

Ours goes the whole way: `quantize` writes an artifact, its convention reads it back. torchao's comes straight
from its function, scale and zero in bf16 as its layout stores them. All linears but lm_head, both. The bf16
weights are evaluated in float32, the documents cut into windows of `--context` tokens.
"""

import argparse
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
import transformers
from scalegate.layouts.formats.int4 import Int4
from scalegate.pipeline.checkpoints.checkpoint import open_checkpoint
from scalegate.pipeline.commands.quantize import quantize
from scalegate.pipeline.conventions.all_conventions import convention_of
from scalegate.pipeline.records.recipe import Recipe
from scalegate.serving_check.quality import read_texts, token_windows
from scalegate.tests.bench.quantization.model_nats import nats_per_token
from torch import Tensor
from torchao.quantization.quant_primitives import _choose_qparams_and_quantize_affine_hqq


def ours(checkpoint: Path, group_size: int) -> dict[str, Tensor]:
    with tempfile.TemporaryDirectory() as folder:
        recipe = Recipe(name=f"g{group_size}", spec=Int4(group_size))
        quantize(checkpoint, recipe, folder, device="cpu", progress=False)
        artifact = open_checkpoint(folder)
        modules = convention_of(artifact).modules(artifact)
        return {name: stored.read().dequantize(torch.float32) for name, stored in modules.items()}


def torchao_hqq(weights: Mapping[str, Tensor], group_size: int) -> dict[str, Tensor]:
    result = {}
    for name, weight in weights.items():
        codes, scale, zero, _ = _choose_qparams_and_quantize_affine_hqq(
            weight, nbits=4, group_size=group_size, compute_dtype=torch.bfloat16, device="cpu"
        )
        centred = codes.float().view(-1, group_size) - 8
        values = centred * scale.float().view(-1, 1) + zero.float().view(-1, 1)
        result[name] = values.view(weight.shape)
    return result


def relative_l2(weights: Mapping[str, Tensor], changed: Mapping[str, Tensor]) -> float:
    error = sum(float((changed[name] - weights[name].float()).double().square().sum()) for name in weights)
    norm = sum(float(weight.double().square().sum()) for weight in weights.values())
    return (error / norm) ** 0.5


def measure(checkpoint: Path, heldout: Path, group_sizes: list[int], context: int) -> dict:
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    windows = token_windows(tokenizer, read_texts(heldout), context)
    stored = open_checkpoint(checkpoint)
    original = nats_per_token(model, windows)
    cells = []
    for group_size in group_sizes:
        mine = ours(checkpoint, group_size)
        weights = {name: stored.read(f"{name}.weight") for name in mine}
        for solver, changed in (
            ("scalegate", mine),
            ("torchao HQQ, fractional", torchao_hqq(weights, group_size)),
        ):
            for name, value in changed.items():
                model.get_submodule(name).weight.data.copy_(value)
            extra = nats_per_token(model, windows) - original
            cells.append(
                {
                    "group_size": group_size,
                    "solver": solver,
                    "relative_l2": relative_l2(weights, changed),
                    "extra_nats_per_token": extra,
                }
            )
            print(f"{checkpoint.name} g{group_size} {solver}: {cells[-1]}", flush=True)
    tokens = sum(len(window) for window in windows)
    return {"checkpoint": checkpoint.name, "tokens": tokens, "nats_per_token": original, "cells": cells}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoints", nargs="+", type=Path)
    parser.add_argument("--heldout", type=Path, required=True)
    parser.add_argument("--groups", type=int, nargs="+", default=[128, 64])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    results = [
        measure(path, arguments.heldout, arguments.groups, arguments.context)
        for path in arguments.checkpoints
    ]
    print(f"\n{'checkpoint':20}{'g':>5}  {'relative L2':>24}{'extra nats/token':>26}   holds")
    holds = True
    for result in results:
        for mine, theirs in zip(result["cells"][0::2], result["cells"][1::2], strict=True):
            better = all(mine[key] <= theirs[key] for key in ("relative_l2", "extra_nats_per_token"))
            holds &= better
            print(
                f"{result['checkpoint']:20}{mine['group_size']:5}"
                f"  {mine['relative_l2']:12.5f} {theirs['relative_l2']:11.5f}"
                f"{mine['extra_nats_per_token']:14.5f} {theirs['extra_nats_per_token']:11.5f}   {better}"
            )
    if arguments.out:
        report = {"context": arguments.context, "evaluated_in": "float32", "torch": torch.__version__}
        arguments.out.write_text(json.dumps(report | {"holds": holds, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
