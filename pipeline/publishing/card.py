"""The model card of a release, filled only from its verdict, its manifest and the base model's own metadata.

Nothing here is measured; values that nobody measured or declared are left out, or the card says that they are
missing.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
import yaml

from ...base.batch_invariance import TUNED
from ...base.untrusted_files import read_json_object
from ...serving_check.engine.options import UNQUANTIZED
from ...serving_check.evidence.verdict import Verdict
from ...serving_check.gate.policy import first_lines_of
from ..checkpoints.config_sections import refuse_malformed
from ..quantization.calibration.calibration_names import CALIBRATION
from ..records.artifact import REPORT_FOLDER, SIGNATURE_NAME, Artifact
from ..records.engine_commands import TEXT_CLASS, TRANSFORMERS, VLLM, VLLM_FAILS, engines
from ..records.sensitivity_table import plain_weights
from ..report.names import BADGE_NAME
from ..report.profile_table import profile_table
from ..report.table import held_out_text, versions_of
from .bundle import report_files
from .card_metadata import HUB, front_matter, licence_files, licence_of
from .card_phrases import (
    baseline_phrase,
    calibration_phrase,
    engine_phrase,
    is_served_by_plugin,
    kernels_phrase,
    quantization_phrase,
    size_phrase,
    states_phrase,
    versions_phrase,
)
from .card_tables import (
    changed_bounds,
    check_row,
    comparison_table,
    curve_row,
    rival_table,
    score_row,
    sensitivity_table,
)
from .markdown import code, fence, plain
from .reproduce import ADOPTED, recipe_file, reproduce

TEMPLATE = Path(__file__).parent / "templates" / "card.md.j2"
PACKED_EXPERT = re.compile(r"\.experts\.\d+\.\w+\.weight_packed$")
BADGE = f"{REPORT_FOLDER}/{BADGE_NAME}"


def write_card(folder: Path, artifact: Artifact, verdict: Verdict, name: str, to: str) -> str:
    """Return the card of the artifact in `folder`, published under `name` by `pipeline push --to TO`."""
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters |= {"plain": plain, "code": code}
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    base = artifact.source if _on_hub(artifact) else Path(artifact.source).name
    text = template.render(
        {
            **_subject(folder, artifact, verdict, name),
            **_measured(folder, artifact, verdict),
            **_made(folder, artifact, verdict, reproduce(artifact, verdict, base, to)),
            "base": base,
            "release": name,
        }
    )
    return _single_blank_lines(text)


def _on_hub(artifact: Artifact) -> bool:
    """Say whether the base model is a repository on the Hub, at a known commit."""
    return artifact.source_revision is not None


def _subject(folder: Path, artifact: Artifact, verdict: Verdict, name: str) -> dict[str, Any]:
    """Return the name of the release, its licence, and how to serve it."""
    config = read_json_object(folder / "config.json", infinity=True)
    refuse_malformed(config, str(folder / "config.json"))
    section = config.get("quantization_config") or {}
    method = section.get("quant_method")
    quantization, short_name = artifact.quantization, name.split("/")[-1]
    model_type = config.get("model_type")
    unread = unread_by(folder, model_type)
    return {
        "front_matter": front_matter(artifact, method, verdict.scores, short_name),
        "name": short_name,
        "base_url": f"{HUB}/{artifact.source}" if _on_hub(artifact) else None,
        "base_revision": artifact.source_revision,
        "quantization": quantization_phrase(artifact, method),
        "bits_per_weight": quantization.get("bits_per_weight"),
        "kept_by_budget": plain_weights(quantization) > 0,
        "relative_error": quantization.get("relative_error"),
        "calibration": calibration_phrase(quantization.get(CALIBRATION)),
        "kv_cache": None if artifact.kv_cache == UNQUANTIZED else artifact.kv_cache,
        "batch_invariance": None if artifact.batch_invariance() == TUNED else artifact.batch_invariance(),
        "size": size_phrase(sum(r.size for n, r in artifact.files.items() if n.endswith(".safetensors"))),
        "licence": licence_of(artifact.base_metadata),
        "licence_files": licence_files(artifact),
        "engines": engines(
            name, method, artifact.kv_cache, _auto_class(model_type), _has_zero_points(section), unread
        ),
        "unread": unread,
    }


def _auto_class(model_type: str | None) -> str:
    """Return the class of transformers that loads models of this type; only a type to look up needs its
    import.
    """
    if model_type is None:
        return TEXT_CLASS
    from ..model_loader.skeleton import auto_class_name

    return auto_class_name(model_type)


def unread_by(folder: Path, model_type: str | None) -> dict[str, str]:
    """Return the engines that cannot load the release, each with its reason."""
    if model_type is None:
        return {}
    from ..checkpoints.checkpoint import open_checkpoint
    from ..model_loader.loaded_by_transformers import why_transformers_fails
    from .vllm_kernels import unread_by_vllm

    checkpoint, unread = open_checkpoint(folder), dict[str, str]()
    if (reason := why_transformers_fails(checkpoint)) is not None:
        unread[TRANSFORMERS] = reason
    if model_type in VLLM_FAILS and any(PACKED_EXPERT.search(name) for name in checkpoint.tensors):
        unread[VLLM] = VLLM_FAILS[model_type]
        return unread
    return unread | unread_by_vllm(checkpoint)


def _has_zero_points(section: Mapping[str, Any]) -> bool:
    """Say whether a quantization config declares weights with zero points, as compressed-tensors does."""
    groups = (section.get("config_groups") or {}).values()
    return any((group.get("weights") or {}).get("symmetric") is False for group in groups)


def _measured(folder: Path, artifact: Artifact, verdict: Verdict) -> dict[str, Any]:
    """Return the figures and decisions of the serving check, and where it ran."""
    environment = verdict.environment
    return {
        "first_lines": first_lines_of(verdict),
        "speed_not_judged": verdict.speed_not_judged is not None,
        "baseline": baseline_phrase(verdict),
        "engine_measured": engine_phrase(verdict),
        "workload": verdict.workload,
        "curve": [curve_row(point) for point in verdict.curve],
        "states": states_phrase(verdict),
        "rival": rival_table(verdict),
        "profile": profile_table(verdict),
        "scores": [score_row(score) for score in verdict.scores],
        "comparison": comparison_table(folder, artifact),
        "badge": BADGE if BADGE in report_files(verdict) else None,
        "plots": [{"title": _title(path), "path": path} for path in plot_files(verdict)],
        "changed_bounds": changed_bounds(verdict.bounds),
        "checks": [check_row(check) for check in verdict.checks],
        "quality_tokens": f"{verdict.quality_tokens:,}",
        "held_out_text": held_out_text(verdict),
        "layouts": ", ".join(f"{count} {layout}" for layout, count in verdict.artifact.layouts.items()),
        "device": environment.device,
        "platform": environment.platform,
        "cpu_count": environment.cpu_count,
        "dtype": environment.dtype,
        "versions": versions_of(environment),
        "kernels": kernels_phrase(verdict),
        "served_by_plugin": is_served_by_plugin(verdict),
    }


def _made(folder: Path, artifact: Artifact, verdict: Verdict, commands: str) -> dict[str, Any]:
    """Return how the artifact was made, and how to make and check it again."""
    recipe = yaml.safe_dump(artifact.recipe, sort_keys=False, allow_unicode=True).rstrip()
    return {
        "recipe": recipe,
        "fence": fence(recipe, commands),
        "adopted": artifact.recipe == ADOPTED,
        "recipe_file": recipe_file(artifact.recipe),
        "sensitivity": sensitivity_table(artifact),
        "quantize_versions": versions_phrase(artifact.versions),
        "reproduce": commands,
        "bytes_digest": verdict.artifact.bytes_digest,
        "signed": (folder / SIGNATURE_NAME).is_file(),
    }


def plot_files(verdict: Verdict) -> list[str]:
    """Return the plots of the gate's report by path inside the release."""
    return [name for name in report_files(verdict) if name.endswith(".png")]


def _title(path: str) -> str:
    return f"{Path(path).stem.replace('_', ' ')} against M"


def _single_blank_lines(text: str) -> str:
    lines: list[str] = []
    for line in text.splitlines():
        if line.strip() or (lines and lines[-1].strip()):
            lines.append(line.rstrip())
    return "\n".join(lines).rstrip() + "\n"
