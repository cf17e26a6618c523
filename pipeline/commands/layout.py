"""Measures the layouts for a checkpoint's layers on this device, and records the plan in the artifact.

`layouts/choosing/choose.py` measures. A plan that was made here, with these versions, is kept.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import torch

from ...base.errors import UserError
from ...base.installed import kernel_versions
from ...layouts.choosing.choose import choose, forced_for, ms_to_measure
from ...layouts.choosing.plan import LayoutPlan, ShapeChoice, device_name
from ...layouts.choosing.tried import Tried, kv_tried_of, tried_of
from ...layouts.kv.format import KV_FORMATS
from ...layouts.packing.all_layouts import LAYOUTS
from ...layouts.packing.layout import Problem
from ...serving_check.engine.offline.kv_timing import time_kv_formats
from ...serving_check.engine.options import UNQUANTIZED
from ..checkpoints.checkpoint import Checkpoint, open_checkpoint
from ..conventions.kv_cache import kv_cache_of
from ..machine.device import resolve_device, resolve_dtype
from ..machine.tested_stack import warn_if_untested
from ..model_loader.attention_shapes import attention_layers_of
from ..model_loader.load_model import problems
from ..records.artifact import MANIFEST_NAME, Artifact

CONTEXTS, CUDA_CONTEXTS = (128, 1024, 4096), (128, 1024, 4096, 16384)
"""The default contexts: the length of the gate's requests, prompt and output together, and longer ones."""


@dataclass(frozen=True)
class LayoutResult:
    """The plan in force, and whether it was measured, kept or replaced."""

    plan: LayoutPlan
    measured: bool
    """Whether it was measured now; False if the recorded plan was kept."""
    stored: bool
    """Whether the plan was written; False if there is no `scalegate.json` to write it into."""
    note: str
    """A sentence that says whether the plan was kept or replaced, and whether a verdict still holds."""
    tried: dict[str, Tried]
    """How we tried the kernels of the plan's layouts that are ours on such a GPU; empty on a CPU."""
    kv_tried: dict[str, Tried]
    """The same of the KV formats that were timed."""


def layout(
    artifact: str | Path,
    *,
    ms: Sequence[int] | None = None,
    force: str | None = None,
    device: str = "auto",
    dtype: str = "auto",
    fresh: bool = False,
    kv: bool = False,
    contexts: Sequence[int] | None = None,
    revision: str | None = None,
    progress: bool = True,
) -> LayoutResult:
    """Choose a layout for every distinct shape of `artifact`'s quantized layers, and record the plan.

    artifact: a folder or a Hub id, in any convention that we read; an artifact gets the plan
    ms:       the Ms to measure; None takes the gate's Ms for the device
    force:    one layout for every dense layer, or for all experts if it is a layout of experts, whatever the
              measurements say; they are recorded all the same
    fresh:    measure again even if there are earlier measurements
    kv:       time the KV formats as well, at each of `ms`
    contexts: context lengths in tokens at which KV formats are timed; None takes the device's defaults
    """
    warn_if_untested()
    on = torch.device(resolve_device(device))
    checkpoint = open_checkpoint(str(artifact), revision)
    to_serve = problems(checkpoint, resolve_dtype(dtype), on)
    if not to_serve and not kv and kv_cache_of(checkpoint).kv_format == UNQUANTIZED:
        raise UserError(f"{checkpoint.source} has no quantized linear layer, so there is no layout to choose")
    ms = ms_to_measure(ms, on)

    # A Hub id opens a snapshot in the Hub's own cache, which is not ours to write into.
    ours = Path(artifact).is_dir()
    manifest = checkpoint.manifest if ours else None
    recorded = LayoutPlan.from_json(manifest.layout_plan) if manifest and manifest.layout_plan else None
    layers = attention_layers_of(checkpoint, resolve_dtype(dtype), on) if kv else {}
    contexts = _contexts(checkpoint, on, contexts) if kv else ()
    stands = recorded is not None and not fresh and _stands(recorded, to_serve, on, ms, force)
    if recorded is not None and stands and _kv_stands(recorded, contexts, ms):
        note = "The recorded plan was made on this device and stands."
        return LayoutResult(recorded, False, True, note, tried_of(recorded, on), kv_tried_of(recorded, on))

    if recorded is not None and stands:
        plan = recorded
    elif to_serve:
        plan = choose(to_serve, ms, force=force, fresh=fresh, progress=progress)
    else:
        plan = LayoutPlan(device_name(on), kernel_versions())
    if kv:
        timed = time_kv_formats(layers, list(KV_FORMATS), contexts, ms, on, progress)
        cells = {(timing.context, timing.m) for timing in timed}
        left_out = tuple(cell for cell in product(contexts, ms) if cell not in cells)
        plan = replace(plan, kv=timed, kv_left_out=left_out)
    if manifest is None:
        note = f"The plan was not stored: {checkpoint.source} has no {MANIFEST_NAME}."
        return LayoutResult(plan, True, False, note, tried_of(plan, on), kv_tried_of(plan, on))
    stored = _store(plan, manifest, checkpoint.folder)
    return LayoutResult(plan, True, True, stored, tried_of(plan, on), kv_tried_of(plan, on))


def _stands(
    plan: LayoutPlan,
    to_serve: Mapping[str, Problem],
    device: torch.device,
    ms: Sequence[int],
    force: str | None,
) -> bool:
    """Say whether measuring again could only repeat the plan's measurements."""
    if not plan.matches(device):
        return False
    choices = {choice.shape: choice for choice in plan.choices}
    for module, problem in to_serve.items():
        choice = choices.get(str(problem))
        if choice is None or module not in choice.modules or not _measured_all(choice, ms):
            return False
        forced = forced_for(force, problem)
        if choice.forced != (forced is not None) or (forced is not None and choice.layout != forced):
            return False
    return True


def _contexts(checkpoint: Checkpoint, device: torch.device, asked: Sequence[int] | None) -> tuple[int, ...]:
    """Return the contexts that were asked for, or the device's defaults up to the model's context. Raise
    UserError if a context beyond the model's is asked for.
    """
    wanted = asked or (CUDA_CONTEXTS if device.type == "cuda" else CONTEXTS)
    if min(wanted) < 1:
        raise UserError(f"--contexts {min(wanted)}: a context is a number of tokens; give 1 or more")
    longest = max(wanted) if checkpoint.context is None else checkpoint.context
    if asked and max(asked) > longest:
        raise UserError(
            f"--contexts {max(asked)} is more than the {longest} tokens of {checkpoint.source}'s context"
        )
    return tuple(sorted({min(context, longest) for context in wanted}))


def _kv_stands(plan: LayoutPlan, contexts: Sequence[int], ms: Sequence[int]) -> bool:
    """Say whether every KV format was timed at each of `contexts` and M, or memory did not hold them."""
    timed = {(timing.kv_format, timing.context, timing.m) for timing in plan.kv}
    formats = set(KV_FORMATS) - {UNQUANTIZED}
    cells = set(product(contexts, ms)) - set(plan.kv_left_out)
    return all((name, *cell) in timed for name in formats for cell in cells)


def _measured_all(choice: ShapeChoice, ms: Sequence[int]) -> bool:
    """Say whether every layout there is now was measured at every M, or refused."""
    measured = choice.measured_layouts
    return set(LAYOUTS) == {*measured, *choice.refusals} and all(
        set(ms) <= set(choice.curve(name)) for name in measured
    )


def _store(plan: LayoutPlan, manifest: Artifact, folder: Path) -> str:
    """Write the plan; a verdict given with another plan no longer holds and is dropped."""
    note = f"The plan is in {folder / MANIFEST_NAME}."
    if manifest.verdict_sha256 is not None:
        manifest.verdict_sha256 = None
        note += f" The verdict was given with another plan: run `pipeline validate {folder}` again."
    manifest.layout_plan = plan.to_json()
    manifest.write(folder)
    return note
