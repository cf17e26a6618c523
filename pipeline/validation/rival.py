"""The checkpoint that an artifact must be faster than: it is given by the user, or made by the recipe's own
rival.

Opens the rival and checks that a comparison makes sense; `serving_check/gate/interleaving.py` measures it.
"""

from pathlib import Path

from ...base.errors import UserError
from ...serving_check.evidence.verdict import Subject
from ..checkpoints.checkpoint import Checkpoint, open_checkpoint
from ..records.artifact import Artifact
from .subject import describe_subject

ALIKE = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
"""Config fields that are equal in two checkpoints of one model."""


def open_rival(
    artifact: Checkpoint, manifest: Artifact | None, given: str | None, revision: str | None = None
) -> Checkpoint | None:
    """Return the given rival, or the rival that the artifact's recipe names; None if there is neither.

    Raises UserError if the rival cannot be opened, is the artifact itself, or is of another model.
    """
    if given is None:
        named = (manifest.recipe.get("rival") if manifest else None) or None
        if manifest is None or named is None:
            return None
        given = str(rival_folder(artifact.folder.resolve().parent, manifest.source, named))
        if not Path(given).is_dir():
            raise UserError(
                f"the recipe names a rival, {named!r}, but there is no folder {given}. Give a checkpoint "
                f"with --rival, or make one: pipeline quantize {manifest.source} {given} --recipe {named}"
            )
    rival = open_checkpoint(given, revision)
    if rival.folder.resolve() == artifact.folder.resolve():
        raise UserError(f"the rival is {artifact.source} itself; give another checkpoint with --rival")
    ours, theirs = _sizes(artifact), _sizes(rival)
    if different := [name for name in ALIKE if ours[name] != theirs[name]]:
        listed = ", ".join(f"{name} {theirs[name]}, not {ours[name]}" for name in different)
        raise UserError(f"the rival, {rival.source}, is another model: {listed}")
    return rival


def describe_rival(rival: Checkpoint) -> Subject:
    return describe_subject(rival, rival.manifest, {})


def rival_folder(work: Path, source: str, recipe: str) -> Path:
    """Return the folder beside the artifact for the rival that `release` makes from `source` by `recipe`."""
    return work / f"{Path(source).name}-{Path(recipe).stem}"


def _sizes(checkpoint: Checkpoint) -> dict[str, object]:
    text = checkpoint.config.get("text_config") or checkpoint.config
    return {name: text.get(name) for name in ALIKE}
