"""Finds the checkpoint that an artifact is compared with if the user names none, and recognizes that
checkpoint by its digest.

The baseline is found from the artifact's own records only; nothing is searched for and nothing is guessed. A
folder's path is kept in a separate record: `scalegate.json`, which is published, contains only the folder's
name and digests.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from ...base.atomic_files import atomic_path
from ...base.errors import UserError
from ...base.untrusted_files import read_outside
from ..records.artifact import SOURCE_NAME, FileRecord
from ..records.file_digests import digest_of, sha256_of_all
from .checkpoint import CONFIG_NAME, Checkpoint, open_checkpoint

MAX_PATH_BYTES = 1 << 16


def open_baseline(artifact: Checkpoint, baseline: str | None, revision: str | None = None) -> Checkpoint:
    """Return the given checkpoint, or the one that the artifact was made from, without the tensors that its
    recipe left out.

    Raise UserError if the baseline cannot be opened, or is the quantized artifact itself.
    """
    if baseline is not None:
        return _without_left_out(artifact, _refuse_itself(artifact, open_checkpoint(baseline, revision)))
    source, recorded = recorded_source(artifact)
    if source is None:
        raise UserError(
            f"{artifact.source} does not say which checkpoint it was made from; give that checkpoint with "
            "--baseline"
        )
    try:
        opened = _refuse_itself(artifact, open_checkpoint(source, revision or recorded))
        return _without_left_out(artifact, opened)
    except UserError as error:
        raise UserError(
            f"{artifact.source} was made from {source}, which cannot be opened: {error.message}\n"
            "Give the unquantized checkpoint with --baseline."
        ) from error


def _without_left_out(artifact: Checkpoint, baseline: Checkpoint) -> Checkpoint:
    """Return `baseline` without the tensors that the artifact's recipe left out, so that the comparison does
    not miss them.
    """
    names = artifact.manifest.quantization.get("left_out") if artifact.manifest else None
    return baseline.without(names) if isinstance(names, list) else baseline


def _refuse_itself(artifact: Checkpoint, baseline: Checkpoint) -> Checkpoint:
    """Return `baseline`, unless it is the artifact, or the same quantized checkpoint elsewhere.

    A plain checkpoint may be compared with itself, to try a setting; a renamed one fails the weights check.
    """
    is_quantized = artifact.quantization_config is not None
    is_there = artifact.folder.resolve() == baseline.folder.resolve()
    is_ours = artifact.manifest is not None
    if (is_there and (is_ours or is_quantized)) or (is_quantized and _are_the_same_bytes(artifact, baseline)):
        raise UserError(
            f"the baseline is {artifact.source} itself, or a copy of it: nothing would be compared. With "
            "--baseline, give the unquantized checkpoint that the model was made from"
        )
    return baseline


def _are_the_same_bytes(artifact: Checkpoint, baseline: Checkpoint) -> bool:
    """Say whether both checkpoints hold the same tensors byte for byte; the bytes are read only if the sizes
    agree.
    """
    if [path.name for path in artifact.shards] != [path.name for path in baseline.shards] or any(
        ours.stat().st_size != theirs.stat().st_size
        for ours, theirs in zip(artifact.shards, baseline.shards, strict=True)
    ):
        return False
    return weights_digest(artifact, {}) == weights_digest(baseline, {})


def weights_digest(checkpoint: Checkpoint, known: Mapping[str, FileRecord]) -> str:
    """Return one sha256 over a checkpoint's config.json and shards, whatever else lies beside them.

    known: records of files that were hashed already; other files are read
    """
    paths = {
        path.relative_to(checkpoint.folder).as_posix(): path
        for path in (checkpoint.folder / CONFIG_NAME, *checkpoint.shards)
    }
    read = sha256_of_all(path for name, path in paths.items() if name not in known)
    return digest_of(
        {name: known[name].sha256 if name in known else read[path] for name, path in paths.items()}
    )


def remember_source(artifact: Path, source: Checkpoint) -> None:
    """Record, on this machine only, the path of the folder that an artifact was made from.

    A Hub snapshot's path is kept too, because it may be in another cache than the default one.
    """
    with atomic_path(artifact / SOURCE_NAME) as partial:
        partial.write_bytes(os.fsencode(source.folder.resolve()))


def recorded_source(artifact: Checkpoint) -> tuple[str | None, str | None]:
    """Return source and revision from `scalegate.json`, else the `_name_or_path` of the config."""
    manifest = artifact.manifest
    if manifest is not None:
        if manifest.source_revision is not None:
            snapshot = _remembered(artifact.folder)
            if snapshot is not None and snapshot.name == manifest.source_revision:
                return str(snapshot), None
            return manifest.source, manifest.source_revision
        return _source_folder(artifact.folder, manifest.source), None
    source = artifact.config.get("_name_or_path")
    return (source, None) if isinstance(source, str) and source else (None, None)


def _source_folder(artifact: Path, name: str) -> str:
    """Return the path of the source when the artifact was made; if it is gone, the folder of that name beside
    the artifact.
    """
    folder = _remembered(artifact)
    return str(artifact.resolve().parent / name) if folder is None else str(folder)


def _remembered(artifact: Path) -> Path | None:
    """Return the folder that the artifact was made from, if its path was recorded and it still exists."""
    record = artifact / SOURCE_NAME
    if not record.is_file():
        return None
    folder = os.fsdecode(read_outside(record, MAX_PATH_BYTES))
    return Path(folder) if "\0" not in folder and Path(folder).is_dir() else None
