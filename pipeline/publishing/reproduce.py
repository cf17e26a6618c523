"""The commands that make a release again, with every setting that is not the default.

The commands name no folder of this machine.
"""

import shlex
from pathlib import Path
from typing import Any

from ...base.option_fields import values_of, words_of
from ...serving_check.adapters.all_engines import DEFAULT_ENGINE, find_engine
from ...serving_check.engine.options import ARTIFACT_ONLY
from ...serving_check.evidence.coded_load import default_input_len
from ...serving_check.evidence.verdict import Verdict
from ...serving_check.settings import Bounds, WorkloadSettings
from ..conventions.plain import NAME as PLAIN
from ..quantization.calibration.calibration_names import CALIBRATION, SELF
from ..records.artifact import Artifact
from ..records.recipe_file import load_recipe, shipped_recipes
from ..validation.options import ValidateOptions
from ..validation.servers import IN_PROCESS, effective_options, sized_options, with_recorded_contexts

DEFAULT_EXPORT = "compressed-tensors"
ADOPTED = {"name": "adopted"}
"""The recipe in the manifest of a checkpoint that another tool quantized."""


def _is_shipped(recipe: dict[str, Any]) -> bool:
    name = recipe.get("name")
    return name in shipped_recipes() and load_recipe(str(name)).to_json() == recipe


def recipe_file(recipe: dict[str, Any]) -> str | None:
    """Return the file name for a reader's copy of the recipe; None if there is no recipe to save."""
    return None if recipe == ADOPTED or _is_shipped(recipe) else f"{recipe.get('name')}.yaml"


def reproduce(artifact: Artifact, verdict: Verdict, base: str, to: str) -> str:
    """Return the one command, with every setting that is not the default, and no folder of this machine in
    it.
    """
    recipe = artifact.recipe
    if recipe == ADOPTED:
        return _reproduce_adopted(artifact, verdict, base, to)
    words = ["pipeline", "release", base]
    if artifact.source_revision is not None:
        words += ["--revision", artifact.source_revision]
    words += ["--recipe", str(recipe.get("name")) if _is_shipped(recipe) else f"{recipe.get('name')}.yaml"]
    export = artifact.quantization.get("export", DEFAULT_EXPORT)
    words += [] if export in (DEFAULT_EXPORT, PLAIN) else ["--export", export]
    text = (artifact.quantization.get(CALIBRATION) or {}).get("source", SELF)
    words += [] if text in (SELF, recipe.get("calibration")) else ["--calibration", text]
    words += _given_baseline(artifact, verdict, base)
    words += _given_settings(artifact, verdict)
    target = f"folder:{Path(to.removeprefix('folder:')).name}" if to.startswith("folder:") else to
    return shlex.join([*words, "--to", target])


def _reproduce_adopted(artifact: Artifact, verdict: Verdict, base: str, to: str) -> str:
    """Return the commands from the other tool's checkpoint on."""
    folder = Path(to.removeprefix("folder:")).name
    revision = [] if artifact.source_revision is None else ["--baseline-revision", artifact.source_revision]
    adopt = ["pipeline", "adopt", folder, "--baseline", base, *revision]
    validate = ["pipeline", "validate", folder, *_given_settings(artifact, verdict)]
    return f"{shlex.join(adopt)}\n{shlex.join(validate)}"


def _given_settings(artifact: Artifact, verdict: Verdict) -> list[str]:
    """Return the settings of the verdict that differ from the defaults."""
    usual = WorkloadSettings(
        input_len=default_input_len(artifact.kv_cache), profile=artifact.recipe.get("profile")
    )
    given = values_of(verdict.workload, unlike=usual)
    given |= values_of(verdict.bounds, unlike=Bounds.from_recipe(artifact.recipe))
    given |= _given_to_validate(artifact, verdict)
    return words_of(given) + _given_options(verdict)


def _given_to_validate(artifact: Artifact, verdict: Verdict) -> dict[str, str | int | None]:
    rival = None if artifact.recipe.get("rival") else verdict.rival
    engine, baseline_engine = verdict.environment.engine, verdict.environment.baseline_engine
    values = {
        "engine": _startable(engine) or DEFAULT_ENGINE,
        "baseline_engine": None if baseline_engine == engine else _startable(baseline_engine),
        "text": verdict.quality_text,
        "quality_tokens": verdict.quality_tokens_asked,
        "rival": None if rival is None else rival.name,
        "rival_revision": None if rival is None else rival.revision,
        "tasks": verdict.tasks,
    }
    usual = values_of(ValidateOptions())
    return {name: value for name, value in values.items() if value != usual[name]}


def _startable(engine: str) -> str | None:
    """Return the engine, if it can be started; None for the address of a running server."""
    known = find_engine(engine)
    return None if known is not None and not known.starts else engine


def _given_baseline(artifact: Artifact, verdict: Verdict, base: str) -> list[str]:
    """Return the baseline, if its name differs from that of the quantized model."""
    baseline = verdict.baseline
    name = baseline.name if baseline.revision is not None else Path(baseline.name).name
    words = [] if name == base else ["--baseline", name]
    if words and baseline.revision is not None:
        words += ["--baseline-revision", baseline.revision]
    return words


def _given_options(verdict: Verdict) -> list[str]:
    """Return the engine's options that `release` would not have set by itself, as words of its command."""
    recorded = verdict.environment.engine_options or {}
    options = sized_options({"device": recorded.get("device")}, verdict.workload)
    usual = effective_options(with_recorded_contexts(options, {}, recorded, verdict.workload.profile))
    told_elsewhere = IN_PROCESS.union(ARTIFACT_ONLY)
    given = {
        name: value
        for name, value in recorded.items()
        if name not in told_elsewhere and usual.get(name) != value
    }
    return words_of(given)
