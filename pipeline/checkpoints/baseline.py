"""Finding what an artifact is to be compared with, where the user did not say.

From the artifact's own records only; nothing is searched for and nothing is guessed. A folder's path stays in
a record of its own: `scalegate.json`, which is published, has its name and what was in it.
"""

import os
from pathlib import Path

from ...layouts.errors import UserError
from ...layouts.files import atomic_path
from ...layouts.outside_files import read_outside
from ..artifact import MANIFEST_NAME, SOURCE_NAME, Artifact
from .checkpoint import Checkpoint, open_checkpoint

MAX_PATH_BYTES = 1 << 16


def open_baseline(artifact: Checkpoint, baseline: str | None, revision: str | None = None) -> Checkpoint:
    """The checkpoint given, or the one that the artifact says it was made from."""
    if baseline is not None:
        return open_checkpoint(baseline, revision)
    source, recorded = recorded_source(artifact)
    if source is None:
        raise UserError(
            f"{artifact.source} does not say which checkpoint it was made from; give it with --baseline"
        )
    try:
        return open_checkpoint(source, revision or recorded)
    except UserError as error:
        raise UserError(
            f"{artifact.source} was made from {source}, which cannot be opened: {error.message}\n"
            "Give the unquantized checkpoint with --baseline."
        ) from error


def remember_source(artifact: Path, source: Checkpoint) -> None:
    """Keep the path of the folder that an artifact was made from, for this machine alone."""
    if source.revision is None:
        with atomic_path(artifact / SOURCE_NAME) as partial:
            partial.write_bytes(os.fsencode(source.folder.resolve()))


def recorded_source(artifact: Checkpoint) -> tuple[str | None, str | None]:
    """Source and revision from `scalegate.json`, else the `_name_or_path` of the config."""
    if (artifact.folder / MANIFEST_NAME).is_file():
        manifest = Artifact.read(artifact.folder)
        if manifest.source_revision is not None:
            return manifest.source, manifest.source_revision
        return _source_folder(artifact.folder, manifest.source), None
    source = artifact.config.get("_name_or_path")
    return (source, None) if isinstance(source, str) and source else (None, None)


def _source_folder(artifact: Path, name: str) -> str:
    """Where the source lay when the artifact was made; failing that, the folder of its name beside it."""
    remembered = artifact / SOURCE_NAME
    if remembered.is_file():
        folder = os.fsdecode(read_outside(remembered, MAX_PATH_BYTES))
        if "\0" not in folder and Path(folder).is_dir():
            return folder
    return str(artifact.resolve().parent / name)
