"""A recipe whose formats differ from layer to layer, chosen by measurement under a budget.

Measurements are kept in the work folder, and later in the manifest, so that no call measures twice.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from ....base.atomic_files import write_json
from ....base.errors import UserError
from ....base.untrusted_files import read_json_object
from ....layouts.formats.weight_format import spec_to_json
from ...checkpoints.checkpoint import Checkpoint
from ...records.artifact import MANIFEST_NAME
from ...records.recipe import Recipe, Rule
from ...records.sensitivity_table import CHOSEN, GROUPS, KEPT_BY_BUDGET, SENSITIVITY, TEXT
from ..calibration.calibration_text import CalibrationText
from ..calibration.self_calibration import beside, can_draw, sample_sequences
from ..job import QuantizeJob
from ..shards.tasks import rule_for
from ..shards.weight_tensors import WeightQuantizer
from ..shards.work_record import CALIBRATION_FOLDER, START_OVER, begun_in
from .allocation import PLAIN, Allocation, Budget, allocate
from .sensitivity import TEXT_SEQUENCES, Group, measure_sensitivity, weights_to_choose_for

KEPT_NAME = "sensitivity.json"
KEY = "key"


@dataclass(frozen=True)
class MixedRecipe:
    """A recipe with a rule for every module. table: the measurements and the choice, for the manifest"""

    recipe: Recipe
    table: dict[str, Any]


def require_choice(job: QuantizeJob) -> None:
    """Raise UserError if there is no layer to choose a format for, before anything is made or drawn."""
    if not weights_to_choose_for(job.tasks.in_order):
        raise nothing_to_choose(job)


def nothing_to_choose(job: QuantizeJob) -> UserError:
    return UserError(
        f"{job.checkpoint.source}: the recipe {job.recipe.name!r} leaves no layer to choose a format for"
    )


def mixed_recipe(
    job: QuantizeJob,
    source: Mapping[str, Any],
    budget: Budget,
    text: CalibrationText,
    folder: Path,
    progress: bool,
) -> MixedRecipe:
    """Return the job's recipe with the formats that reduce the loss most within `budget`.

    Modules that a rule of the recipe names keep the rule's format, and so do modules that are merged with
    them. source: the identity of the checkpoint's bytes
    folder: the artifact's folder, which this job has locked
    """
    recipe, tasks = job.recipe, job.tasks
    key = _key(source, recipe, text, job.export)
    groups = _kept(folder, key)
    if groups is None:
        if begun_in(folder):
            raise UserError(f"{folder} was made with another source, recipe or text; {START_OVER}")
        work = folder / CALIBRATION_FOLDER
        work.mkdir(exist_ok=True)
        drawn = work / f"drawn-{key[:16]}.safetensors"
        sequences = _sequences(job.checkpoint, text, job.quantizer, drawn, progress)
        linears = [task.linear for task in tasks.in_order if task.linear is not None]
        fixed = [linear.module for linear in linears if rule_for(recipe, linear) is not None]
        groups = measure_sensitivity(
            job.checkpoint, tasks.in_order, sequences, job.quantizer, job.convention, work, progress, fixed
        )
        if not groups:
            raise nothing_to_choose(job)
        write_json(work / KEPT_NAME, {KEY: key, GROUPS: [group.to_json() for group in groups]})
    free = {module for group in groups for module in group.modules}
    beside = {module: spec for module, spec in tasks.specs.items() if module not in free}
    weights = {module: math.prod(tasks.shapes[module]) for module in beside}
    bits = sum(
        spec.bits_per_weight(*tasks.shapes[module]) * weights[module] for module, spec in beside.items()
    )
    chosen = allocate(groups, budget, (sum(weights.values()), bits))
    if not beside and set(chosen.chosen) == {PLAIN}:
        raise UserError(
            f"--max-kl {budget.divergence:g}: no layer can be quantized within this divergence; "
            "give a larger one"
        )
    rules = tuple(
        Rule(module, spec, KEPT_BY_BUDGET if spec == PLAIN else "")
        for module, spec in chosen.by_module().items()
    )
    return MixedRecipe(replace(recipe, rules=(*rules, *recipe.rules)), _table(key, chosen, budget, text))


def _sequences(
    checkpoint: Checkpoint, text: CalibrationText, quantizer: WeightQuantizer, kept: Path, progress: bool
) -> Tensor:
    """Return the sequences to measure on; if a text is given, half of the sequences are self-generated, as in
    calibration.
    """
    device = quantizer.device
    if text.sequences is not None and not can_draw(checkpoint, device):
        return text.sequences
    count = TEXT_SEQUENCES if text.sequences is None else TEXT_SEQUENCES // 2
    own = sample_sequences(checkpoint, (count, text.shape[1]), device, kept, progress)
    return own if text.sequences is None else beside(text.sequences, own)


def _key(source: Mapping[str, Any], recipe: Recipe, text: CalibrationText, export: str) -> str:
    """Return one digest of everything that decides the measurements."""
    said = [source, recipe.to_json(), text.parameters, export]
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def _kept(folder: Path, key: str) -> list[Group] | None:
    """Return the groups that an earlier call measured under the same `key`; None if there is no such call."""
    for path in (folder / CALIBRATION_FOLDER / KEPT_NAME, folder / MANIFEST_NAME):
        if not path.is_file():
            continue
        value = read_json_object(path)
        found = value if path.name == KEPT_NAME else value.get("quantization", {}).get(SENSITIVITY, {})
        if found.get(KEY) == key:
            return [Group.from_json(group) for group in found[GROUPS]]
    return None


def _table(key: str, chosen: Allocation, budget: Budget, text: CalibrationText) -> dict[str, Any]:
    asked = {"target_bits": budget.bits, "max_kl": budget.divergence}
    return {
        KEY: key,
        TEXT: {"source": text.name, **text.parameters},
        **{name: value for name, value in asked.items() if value is not None},
        "bits_per_weight": round(chosen.bits, 4),
        "kl": float(f"{chosen.divergence:.4g}"),
        GROUPS: [
            group.to_json() | {CHOSEN: spec_to_json(spec)}
            for group, spec in zip(chosen.groups, chosen.chosen, strict=True)
        ],
    }
