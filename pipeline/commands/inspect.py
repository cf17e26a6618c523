"""Describes a checkpoint, ours or anybody's: formats, exact bits per weight, sizes, plan, verdict.

Only headers, scales, norms, biases and records are read, except that an artifact's files are hashed. Nothing
is judged, but a checkpoint that contradicts itself is refused.
"""

import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ...base.errors import UserError
from ...serving_check.evidence.verdict import Verdict
from ..checkpoints.checkpoint import Checkpoint, open_checkpoint
from ..conventions.all_conventions import convention_of
from ..conventions.convention import StoredWeight
from ..conventions.declared import stored_weights
from ..conventions.kv_cache import declared_kv_format
from ..publishing.examination import Examination, examine
from ..records.artifact import MANIFEST_NAME, Artifact
from ..records.signature import Signature

WEIGHT = ".weight"


@dataclass(frozen=True)
class FormatSummary:
    """A summary of the modules that are stored in one format."""

    format: str
    modules: int
    weights: int
    """Number of weights in these modules: the sum of N·K."""
    nbytes: int
    """Bytes of codes, scales, zero points and shapes together."""

    @property
    def bits_per_weight(self) -> float:
        return self.nbytes * 8 / self.weights


@dataclass
class Inspection:
    """What `pipeline inspect` shows."""

    model: str
    revision: str | None
    convention: str
    formats: list[FormatSummary]
    kept_modules: list[str]
    """Matrices that are stored unquantized: embeddings, the output projection, routers."""
    kept_nbytes: int
    """Bytes of all tensors that are not in `formats`, norms and biases included."""
    weight_nbytes: int
    shards: int
    kv_cache: str
    """The KV format that the checkpoint declares for serving."""
    state_bytes: int | None
    """Bytes that recurrent layers keep for each request in serving; None if it is not known."""
    is_artifact: bool
    """Whether the checkpoint has a manifest of ours; without one, the fields below are empty."""
    source: str | None = None
    source_revision: str | None = None
    recipe: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    changed_files: list[str] = field(default_factory=list)
    layout_plan: dict[str, Any] | None = None
    verdict: Verdict | None = None
    verdict_problem: str | None = None
    """Why the verdict does not hold for the artifact's present files; None if it holds, or if there is
    none."""
    signature: Signature | None = None
    """The state of the verdict's signature; None if there is no verdict."""

    @property
    def quantized_modules(self) -> int:
        return sum(summary.modules for summary in self.formats)

    def to_json(self) -> dict[str, Any]:
        value = asdict(self) | {"verdict": self.verdict.to_json() if self.verdict else None}
        value["formats"] = [asdict(s) | {"bits_per_weight": s.bits_per_weight} for s in self.formats]
        return value


def inspect(model: str | Path, revision: str | None = None, signers: str | Path | None = None) -> Inspection:
    """Describe `model`, a folder or a Hub id of any convention we read.

    signers: an allowed-signers file with which the verdict's signature is checked
    """
    folder = Path(model).expanduser()
    try:
        checkpoint = open_checkpoint(str(model), revision)
    except UserError as error:
        is_artifact = (folder / MANIFEST_NAME).is_file()
        changed = Artifact.read(folder).changed_files(folder) if is_artifact else []
        if not changed:
            raise
        lines = "\n  ".join(changed[:10])
        raise UserError(
            f"{error.message}\nthe files of {folder} are not the quantized ones:\n  {lines}"
        ) from error
    convention = convention_of(checkpoint)
    stored = stored_weights(checkpoint)
    # Imports transformers, which publishing and verifying do without.
    from ..model_loader.attention_shapes import state_bytes_of
    from ..model_loader.contradictions import refuse_contradictions

    refuse_contradictions(checkpoint)
    in_formats = {name for weight in stored.values() for name in weight.tensors}
    inspection = Inspection(
        model=checkpoint.source,
        revision=checkpoint.revision,
        convention=convention.name,
        formats=_formats(checkpoint, stored),
        kept_modules=_kept(checkpoint, in_formats),
        kept_nbytes=sum(t.nbytes for name, t in checkpoint.tensors.items() if name not in in_formats),
        weight_nbytes=checkpoint.nbytes,
        shards=len(checkpoint.shards),
        kv_cache=declared_kv_format(checkpoint),
        state_bytes=state_bytes_of(checkpoint),
        is_artifact=False,
    )
    if checkpoint.manifest is not None:
        found = examine(checkpoint.folder, checkpoint.manifest, None if signers is None else Path(signers))
        _add_records(inspection, found)
    return inspection


def _formats(checkpoint: Checkpoint, stored: dict[str, StoredWeight]) -> list[FormatSummary]:
    groups: dict[str, list[StoredWeight]] = {}
    for weight in stored.values():
        groups.setdefault(weight.stored_as or weight.spec.label, []).append(weight)
    summaries = []
    for name, weights in sorted(groups.items()):
        # A fused tensor stands behind several modules and lies there once.
        tensors = {tensor for weight in weights for tensor in weight.tensors}
        summaries.append(
            FormatSummary(
                format=name,
                modules=len(weights),
                weights=sum(math.prod(weight.shape) for weight in weights),
                nbytes=sum(checkpoint.tensors[tensor].nbytes for tensor in tensors),
            )
        )
    return summaries


def _kept(checkpoint: Checkpoint, in_formats: set[str]) -> list[str]:
    return [
        name.removesuffix(WEIGHT)
        for name, tensor in checkpoint.tensors.items()
        if name not in in_formats and len(tensor.shape) >= 2
    ]


def _add_records(inspection: Inspection, found: Examination) -> None:
    manifest = found.manifest
    inspection.is_artifact = True
    inspection.source, inspection.source_revision = manifest.source, manifest.source_revision
    inspection.recipe, inspection.versions = manifest.recipe, manifest.versions
    inspection.changed_files = found.changed_files
    inspection.layout_plan = manifest.layout_plan
    inspection.verdict = found.verdict
    if found.verdict is not None:
        inspection.signature = found.signature
    broken = [finding for finding in found.broken if finding.name != "files" or found.verdict]
    inspection.verdict_problem = broken[0].said if broken else None
