"""A manifest for a checkpoint that another tool quantized, so that it can be validated, pushed and verified.

The manifest does not rely on the checkpoint's claims: it records each quantized module's measured error
against the baseline. Nothing of the checkpoint is changed.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...base.errors import UserError
from ...base.installed import NOT_INSTALLED, installed_version
from ...layouts.formats.weight_format import spec_to_json
from ..checkpoints.base_metadata import read_base_metadata
from ..checkpoints.baseline import open_baseline, remember_source, weights_digest
from ..checkpoints.checkpoint import Checkpoint, open_checkpoint
from ..checkpoints.companion_files import refuse_strangers
from ..conventions.all_conventions import convention_of
from ..conventions.convention import StoredWeight
from ..conventions.declared import stored_weights
from ..conventions.kv_cache import kv_cache_of
from ..model_loader.contradictions import refuse_contradictions
from ..publishing.reproduce import ADOPTED
from ..records.artifact import MANIFEST_NAME, Artifact, published_files, record_files
from ..records.engine_commands import kv_cache_commands
from ..validation.weights import squared_errors

VERSIONED_PACKAGES = ("scalegate", "torch", "transformers")


def adopt(
    checkpoint: str | Path,
    baseline: str | Path,
    *,
    baseline_revision: str | None = None,
    progress: bool = True,
) -> Artifact:
    """Write `scalegate.json` into the folder `checkpoint`, quantized from `baseline` by another tool.

    baseline: a folder or a Hub id, unquantized

    Raise UserError if the folder has a manifest already, holds files that are not published, is not quantized
    in a convention that we read, or has modules that the baseline lacks.
    """
    folder = Path(checkpoint).expanduser()
    if not folder.is_dir():
        raise UserError(
            f"{folder} is not a folder here; download the checkpoint first, because the manifest is written "
            "beside the weights"
        )
    if (folder / MANIFEST_NAME).exists():
        raise UserError(f"{folder} has a {MANIFEST_NAME} already; remove it to adopt the checkpoint again")
    ours = replace(open_checkpoint(str(folder)), as_released=True)
    source = open_baseline(ours, str(baseline), baseline_revision)
    convention = convention_of(ours)
    stored = stored_weights(ours)
    if not stored:
        raise UserError(
            f"{folder} is not quantized in a convention that Scalegate reads, so there is nothing to adopt"
        )
    refuse_contradictions(ours)
    refuse_strangers(folder, published_files(folder), None)
    squares = squared_errors(ours, source, progress=progress)
    unknown = [module for module in stored if module not in squares]
    if unknown:
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        raise UserError(
            f"{unknown[0]}{more} of {folder} is not in {source.source}, or has another shape there; give the "
            "checkpoint that it was quantized from with --baseline"
        )
    kv_cache = kv_cache_of(ours).kv_format
    artifact = Artifact(
        source=source.public_name,
        source_revision=source.revision,
        recipe=dict(ADOPTED),
        versions={name: installed_version(name) or NOT_INSTALLED for name in VERSIONED_PACKAGES},
        files=record_files(folder),
        quantization=_quantization(ours, convention.name, stored, squares),
        base_metadata=read_base_metadata(source.folder),
        source_sha256=weights_digest(source, {}),
        kv_cache=kv_cache,
        kv_cache_engines=kv_cache_commands(kv_cache),
    )
    remember_source(folder, source)
    artifact.write(folder)
    return artifact


def _quantization(
    checkpoint: Checkpoint,
    convention: str,
    stored: Mapping[str, StoredWeight],
    squares: Mapping[str, tuple[float, float]],
) -> dict[str, Any]:
    """Return the manifest's entry for the formats and for each module's error.

    squares: for each module, the sums of its squared errors and of its squared weights
    """
    tensors = {name for weight in stored.values() for name in weight.tensors}
    weights = sum(math.prod(weight.shape) for weight in stored.values())
    bits = 8 * sum(checkpoint.tensors[name].nbytes for name in tensors)
    errors = {module: _relative(*squares[module], module) for module in stored}
    error, norm = (sum(each) for each in zip(*squares.values(), strict=True))
    specs = Counter(weight.spec for weight in stored.values())
    return {
        "formats": [
            {"label": spec.label, "modules": count, "spec": spec_to_json(spec)}
            for spec, count in specs.most_common()
        ],
        "export": convention,
        "bits_per_weight": round(bits / weights, 4),
        "relative_error": _relative(error, norm, "all weights"),
        "modules": {
            module: {
                "shape": list(weight.shape),
                "format": weight.spec.name,
                "relative_error": errors[module],
            }
            for module, weight in stored.items()
        },
        "kept": {},
    }


def _relative(error: float, norm: float, name: str) -> float:
    """Return the relative error from sums of squares. Raise UserError if a weight is NaN or infinite."""
    value = math.sqrt(error / norm) if norm else math.sqrt(error)
    if not math.isfinite(value):
        raise UserError(
            f"{name}: a weight of the checkpoint or of the baseline is NaN or infinite; the checkpoint is "
            "not adopted"
        )
    return value
