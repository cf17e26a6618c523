"""The manifest that `quantize` writes: the source's identity, the settings that decide the bytes, the
measurements.

`quantization/write_shards.py` writes the files themselves.
"""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...base.installed import NOT_INSTALLED, installed_version
from ...layouts.formats.weight_format import spec_to_json
from ..checkpoints.base_metadata import read_base_metadata
from ..checkpoints.baseline import weights_digest
from ..checkpoints.checkpoint import CONFIG_NAME, Checkpoint
from ..quantization.budget.allocation import PLAIN_BITS
from ..quantization.job import QuantizeJob
from ..quantization.shards.progress import byte_bar
from ..quantization.shards.ranks import Ranks
from ..quantization.shards.work_record import WorkRecord, parameters_digest
from ..quantization.write_shards import rounded
from ..records.artifact import SCALED_BY, Artifact, FileRecord, record_files
from ..records.engine_commands import kv_cache_commands
from ..records.file_digests import sha256_of_each
from ..records.sensitivity_table import plain_weights

VERSIONED_PACKAGES = ("scalegate", "torch", "transformers", "torchao")
MODULE_FIGURES = ("shape", "format", "relative_error", SCALED_BY, "output_error")
"""The manifest's fields for each quantized module."""


def source_of(
    checkpoint: Checkpoint, copied: Mapping[str, Path], ranks: Ranks, progress: bool
) -> dict[str, Any]:
    """Return the identity of the checkpoint's bytes: the Hub's commit, or the digests of its files."""
    source: dict[str, Any] = {"name": checkpoint.public_name, "revision": checkpoint.revision}
    if checkpoint.revision is not None:
        return source
    paths = [checkpoint.folder / CONFIG_NAME, *checkpoint.shards, *copied.values()]
    sizes = {path: path.stat().st_size for path in paths}
    with byte_bar(sum(sizes.values()), "checking the source", ranks, progress) as read:
        mine = {}
        dealt = ranks.deal("checking the source", paths, sizes.__getitem__)
        for path, digest in sha256_of_each(dealt):
            mine[path.relative_to(checkpoint.folder).as_posix()] = digest
            read(sizes[path])
    digests: dict[str, str] = {}
    for theirs in ranks.gather("source digests", mine):
        digests |= theirs
    names = {path.relative_to(checkpoint.folder).as_posix(): size for path, size in sizes.items()}
    return source | {"files": {name: {"size": names[name], "sha256": digests[name]} for name in names}}


def parameters_of(job: QuantizeJob, source: dict[str, Any], max_shard_bytes: int) -> dict[str, Any]:
    """Everything that decides the artifact's bytes."""
    return {
        "source": source,
        "recipe": job.recipe.to_json(),
        "export": job.export,
        "shard size": max_shard_bytes,
        "versions": {name: installed_version(name) or NOT_INSTALLED for name in VERSIONED_PACKAGES},
        **({"calibration text": job.text.parameters} if job.text else {}),
    }


def manifest_of(
    job: QuantizeJob,
    record: WorkRecord,
    parameters: dict[str, Any],
    written: set[str],
    told: dict[str, Any],
) -> Artifact:
    """Return the manifest. told: the record of how formats were chosen and which text was read, if any"""
    checkpoint, recipe = job.checkpoint, job.recipe
    shards = {name: shard.file for name, shard in record.shards.items()}
    measured = {module: value for shard in record.shards.values() for module, value in shard.modules.items()}
    specs, shapes = job.tasks.specs, job.tasks.shapes
    measured = {module: measured[module] for module in specs}
    elements = {module: n * k for module, (n, k) in shapes.items()}
    bits = sum(
        elements[module] * job.convention.bits_per_weight(spec, *shapes[module])
        for module, spec in specs.items()
    )
    # What a budget has kept plain is of what it counted.
    plain = plain_weights(told)
    weights, bits = sum(elements.values()) + plain, bits + PLAIN_BITS * plain
    norm = sum(value["squared_norm"] for value in measured.values())
    error = sum(value["squared_error"] for value in measured.values())
    quantization = {
        "formats": [
            {"label": spec.label, "modules": count, "spec": spec_to_json(spec)}
            for spec, count in Counter(specs.values()).most_common()
        ],
        "export": job.export,
        "bits_per_weight": round(bits / weights, 4) if weights else 0.0,
        "relative_error": rounded((error / norm) ** 0.5) if norm else 0.0,
        "modules": {
            module: {key: value[key] for key in MODULE_FIGURES if key in value}
            for module, value in measured.items()
        },
        **told,
        "kept": job.tasks.kept,
        **({"left_out": list(checkpoint.left_out)} if checkpoint.left_out else {}),
        "untied_lm_head": job.tasks.untied,
        "source": parameters["source"],
        "parameters_sha256": parameters_digest(parameters),
    }
    return Artifact(
        source=checkpoint.public_name,
        source_revision=checkpoint.revision,
        recipe=recipe.to_json(),
        versions=parameters["versions"],
        files={name: file for name, file in record_files(record.folder, shards).items() if name in written},
        quantization=quantization,
        base_metadata=read_base_metadata(checkpoint.folder),
        source_sha256=weights_digest(checkpoint, _source_records(parameters)),
        kv_cache=recipe.kv_cache,
        kv_cache_engines=kv_cache_commands(recipe.kv_cache),
    )


def _source_records(parameters: dict[str, Any]) -> dict[str, FileRecord]:
    """Return the files of a source folder, hashed when the job began; empty for a Hub id."""
    files = parameters["source"].get("files", {})
    return {name: FileRecord(**record) for name, record in files.items()}
