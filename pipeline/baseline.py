"""Finding what an artifact is to be compared with, where the user did not say.

From the artifact's own records only; nothing is searched for and nothing is guessed.
"""

from pathlib import Path

from ..layouts.errors import UserError
from .artifact import MANIFEST_NAME, Artifact
from .checkpoint import Checkpoint, open_checkpoint


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


def recorded_source(artifact: Checkpoint) -> tuple[str | None, str | None]:
    """Source and revision from `scalegate.json`, else the `_name_or_path` of the config."""
    if (artifact.folder / MANIFEST_NAME).is_file():
        manifest = Artifact.read(artifact.folder)
        return _beside(artifact.folder, manifest.source), manifest.source_revision
    source = artifact.config.get("_name_or_path")
    return (source, None) if isinstance(source, str) and source else (None, None)


def _beside(folder: Path, source: str) -> str:
    """A relative folder is looked for from here first, then from where the artifact lies."""
    if not Path(source).is_dir() and (folder.parent / source).is_dir():
        return str(folder.parent / source)
    return source
