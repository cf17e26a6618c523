"""Loading a checkpoint of any convention we read into the unmodified transformers model, linears packed.

One weight at a time is read, packed and put in place, so nothing is held twice. transformers' own quantizers
are not involved. The engine serves the model.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from ...base.batch_invariance import BatchInvariance
from ...base.log import logger
from ...layouts.choosing.plan import LayoutPlan
from ...layouts.packing.layout import Problem
from ..checkpoints.checkpoint import Checkpoint, open_checkpoint
from ..checkpoints.default_dtype import default_dtype
from ..checkpoints.tokenizer import load_tokenizer
from ..conventions.convention import StoredWeight
from ..conventions.declared import refuse_spoilt_vectors, stored_weights
from .contradictions import refuse_misdeclared
from .dequantize_note import dequantized_note, emulation_note
from .merge_groups import merge_groups
from .skeleton import build_skeleton
from .weight_loader import LayoutPicker, WeightLoader


@dataclass
class LoadedModel:
    """A model ready to run, and its checkpoint."""

    model: PreTrainedModel
    checkpoint: Checkpoint
    layouts: dict[str, str]
    """The layout of every packed product, by its name (`products.py`): merged layers are one."""
    generation_config: GenerationConfig

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """Return the checkpoint's tokenizer, loaded at the first access; None if there is none."""
        return load_tokenizer(self.checkpoint)


def load_model(
    model: str | Path | Checkpoint,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    plan: LayoutPlan | None = None,
    layout: str | None = None,
    batch_invariance: BatchInvariance = "tuned",
    progress: bool = True,
    instead: Mapping[str, StoredWeight] | None = None,
) -> LoadedModel:
    """Load a checkpoint, open already, in a folder or on the Hub, for inference on `device`.

    dtype:  the dtype of activations and unquantized weights; None takes the config's
    plan:   which layout serves which layer; None takes the one in the artifact's `scalegate.json`
    layout: one layout for every quantized dense layer, or, if it is a layout of experts, for all experts,
            whatever the plan says
    batch_invariance: what a row's bits may depend on; only layouts that keep to it are used
    instead: weights that replace the checkpoint's own, by module
    """
    checkpoint = model if isinstance(model, Checkpoint) else open_checkpoint(model)
    device = torch.device(device)
    stored = stored_weights(checkpoint) | dict(instead or {})
    dtype = dtype or default_dtype(checkpoint)
    skeleton = build_skeleton(checkpoint, dtype, device)
    picker = LayoutPicker(plan or _recorded_plan(checkpoint, device), layout)
    loader = WeightLoader(
        checkpoint, stored, skeleton, device, picker, merge_groups(checkpoint, dtype), batch_invariance
    )
    refuse_misdeclared(checkpoint, stored, skeleton, loader.assignments())
    refuse_spoilt_vectors(checkpoint, stored)
    loader.load(progress)
    for name, count in Counter(loader.layouts.values()).items():
        logger.debug(f"{checkpoint.source}: {count} products in layout {name}")
    # Whoever names a layout needs no notice about it.
    notes = [dequantized_note(loader.problems, loader.layouts) if layout is None else None]
    notes.append(emulation_note(loader.problems, loader.layouts))
    for note in notes:
        if progress and note is not None:
            logger.warning(note)
    return LoadedModel(
        model=skeleton,
        checkpoint=checkpoint,
        layouts=loader.layouts,
        generation_config=_generation_config(checkpoint, skeleton),
    )


def problems(
    checkpoint: Checkpoint,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    batch_invariance: BatchInvariance = "tuned",
) -> dict[str, Problem]:
    """Return the problems that a layout has to serve in this checkpoint, by the product's name; weights are
    merged as in serving.

    No data is read but the scales on which merging depends.
    """
    stored = stored_weights(checkpoint)
    dtype = dtype or default_dtype(checkpoint)
    device = torch.device(device)
    skeleton = build_skeleton(checkpoint, dtype)
    groups = merge_groups(checkpoint, dtype)
    loader = WeightLoader(checkpoint, stored, skeleton, device, LayoutPicker(None, None), groups)
    return {
        product.name: product.problem(loader.stored, dtype, device, batch_invariance)
        for product in loader.products()
    }


def _recorded_plan(checkpoint: Checkpoint, device: torch.device) -> LayoutPlan | None:
    """Return the plan in the artifact, if it was measured on this kind of device."""
    recorded = checkpoint.manifest.layout_plan if checkpoint.manifest else None
    plan = LayoutPlan.from_json(recorded) if recorded else None
    return plan if plan is not None and plan.fits(device) else None


def _generation_config(checkpoint: Checkpoint, model: PreTrainedModel) -> GenerationConfig:
    if (checkpoint.folder / "generation_config.json").is_file():
        return GenerationConfig.from_pretrained(checkpoint.folder)
    return model.generation_config or GenerationConfig.from_model_config(model.config)
