"""An artifact as transformers with compressed-tensors reads it, beside what our loader makes of it."""

import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from scalegate.layouts.formats.int4 import Int4
from scalegate.pipeline.checkpoints.checkpoint import open_checkpoint
from scalegate.pipeline.commands.quantize import quantize
from scalegate.pipeline.model_loader.load_model import load_model
from scalegate.pipeline.model_loader.skeleton import auto_class_of
from scalegate.pipeline.records.recipe import Recipe
from transformers.utils import logging

BOUND = 1e-2
"""Relative L2 error of logits: an order of magnitude below what INT4 does to those of these models."""


def round_scales(folder: Path) -> None:
    """Make every scale a power of two, with its sign.

    compressed-tensors rounds the experts that it dequantizes to bf16, which may send a token to other ones.
    These products need no rounding.
    """
    path = folder / "model.safetensors"
    tensors = load_file(path)
    scales = {
        n: torch.copysign(t.float().abs().log2().round().exp2(), t.float()).to(t.dtype)
        for n, t in tensors.items()
        if "_scale" in n
    }
    save_file(tensors | scales, path, {"format": "pt"})


def read_by_both(folder: Path, meant: Path | None = None, **more: Any) -> tuple[float, set[str]]:
    """The relative error of transformers' logits of some tokens, and the tensors that it missed, had no place
    for, or found in another shape.

    meant: what our loader reads, where that is another checkpoint; more: for transformers' `from_pretrained`
    """
    ours = load_model(meant or folder, progress=False, dtype=torch.float32).model
    auto_class = auto_class_of(open_checkpoint(folder), ours)
    logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs, told = auto_class.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True, **more
        )
    for parameter in theirs.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.float()
    vocabulary = ours.config.get_text_config().vocab_size
    tokens = torch.arange(3, 27)[None] % vocabulary
    with torch.inference_mode():
        expected, found = (model(tokens).logits for model in (ours, theirs))
    error = float((found - expected).norm() / expected.norm())
    return error, {str(key) for kind in told.values() for key in kind}


def assert_transformers_reads_int4_of(source: Path, out: Path) -> None:
    """Quantize `source` and hold transformers to every tensor and to our logits."""
    recipe = Recipe("read elsewhere", spec=Int4(32, symmetric=True))
    assert quantize(source, recipe, out, progress=False).quantization["modules"]
    round_scales(out)
    error, strayed = read_by_both(out)
    assert strayed == set() and error <= BOUND
