"""Publish an artifact that has passed the gate, to the Hub or into a folder; refuse anything else.

What a release consists of is `bundle.py`, its card `card.py`; how it gets there is `hub/` and
`folder_target.py`.
"""

from pathlib import Path

from ..layouts.errors import UserError
from ..layouts.outside_names import require_file
from ..serving_check.record import read_verdict
from ..serving_check.verdict import Verdict
from .artifact import VERDICT_NAME, Artifact, sha256_of
from .checkpoints.travelling_files import refuse_strangers
from .publishing.bundle import collect_bundle, left_out_of_report
from .publishing.card import write_card
from .publishing.folder_target import preview_folder, publish_to_folder
from .publishing.push_result import PushResult

FOLDER_PREFIX = "folder:"


def push(
    artifact: str | Path,
    to: str,
    *,
    private: bool = False,
    create_pr: bool = False,
    revision: str | None = None,
    dry_run: bool = False,
    progress: bool = True,
) -> PushResult:
    """Publish the folder `artifact` to `to`: a Hub repository `ORG/NAME`, or `folder:DIR`.

    With `dry_run` nothing is changed anywhere, and the result lists what would be.
    """
    folder = Path(artifact).expanduser()
    directory = _directory(to)
    _refuse_hub_options(directory, private, create_pr, revision)
    manifest, verdict = require_passing_verdict(folder)
    if directory is not None:
        if directory.resolve().is_relative_to(folder.resolve()):
            raise UserError(f"{directory} lies in the artifact itself; give a folder elsewhere")
        files = collect_bundle(folder, manifest, write_card(folder, manifest, verdict, directory.name, to))
        if dry_run:
            return _with_left_out(preview_folder(files, directory), folder)
        return _with_left_out(publish_to_folder(files, directory, progress), folder)

    from .publishing.hub.publish import HubTarget, preview_hub, publish_to_hub

    target = HubTarget(to, private, create_pr, revision)
    files = collect_bundle(folder, manifest, write_card(folder, manifest, verdict, to, to))
    if dry_run:
        return _with_left_out(preview_hub(files, target, folder), folder)
    title = f"Release of {manifest.source}, quantized"
    return _with_left_out(publish_to_hub(files, target, folder, title, progress), folder)


def _with_left_out(result: PushResult, folder: Path) -> PushResult:
    for name, reason in left_out_of_report(folder).items():
        result.notes.append(f"left out {name}: {reason}")
    return result


def check_target(
    artifact: Path, to: str, private: bool = False, create_pr: bool = False, revision: str | None = None
) -> None:
    """Refuse what `push` to `to` would refuse whatever the artifact holds; sends nothing that writes."""
    directory = _directory(to)
    _refuse_hub_options(directory, private, create_pr, revision)
    if directory is not None:
        preview_folder([], directory)
        return
    from .publishing.hub.publish import HubTarget, preview_hub

    preview_hub([], HubTarget(to, private, create_pr, revision), artifact)


def _refuse_hub_options(directory: Path | None, private: bool, create_pr: bool, revision: str | None) -> None:
    if directory is not None and (private or create_pr or revision is not None):
        raise UserError("--private, --create-pr and --revision are for the Hub; a folder has none of them")


def require_passing_verdict(folder: Path) -> tuple[Artifact, Verdict]:
    """The manifest and the verdict in `folder`.

    Raises UserError unless the verdict is a pass, given for exactly these bytes and this layout plan.
    """
    manifest = Artifact.read(folder)
    path = folder / VERDICT_NAME
    validate = f"`pipeline validate {folder}`"
    if not path.is_file():
        raise UserError(
            f"{folder} has no verdict ({VERDICT_NAME}); nothing is published without one. Run {validate}"
        )
    changed = manifest.changed_files(folder)
    if changed:
        raise UserError(
            f"{folder} is not what was quantized and validated:\n  "
            + "\n  ".join(changed[:10])
            + f"\nRestore these files, or quantize again and run {validate}"
        )
    refuse_strangers(folder, manifest.files, manifest.recipe.get("files"))
    verdict = read_verdict(require_file(folder, VERDICT_NAME))
    if verdict.artifact.bytes_digest != manifest.bytes_digest():
        raise UserError(
            f"{path} is a verdict on other bytes ({verdict.artifact.name}, digest "
            f"{verdict.artifact.bytes_digest[:12]}; these are {manifest.bytes_digest()[:12]}). Run {validate}"
        )
    if manifest.verdict_sha256 is None:
        raise UserError(
            f"{folder}'s manifest names no verdict: {VERDICT_NAME} is from before the layout plan changed, "
            f"or was put there by hand. Run {validate}"
        )
    if manifest.verdict_sha256 != sha256_of(path):
        raise UserError(f"{path} was edited after it was given. Run {validate}")
    if verdict.artifact.layout_plan_sha256 != manifest.layout_plan_sha256():
        raise UserError(f"{folder} was laid out again after its verdict was given. Run {validate}")
    if verdict.status != "pass":
        raise UserError(
            f"the verdict on {folder} is {verdict.status}, so it is not published:\n  "
            + "\n  ".join(f"{c.name}: {c.measured}, bound {c.bound}. {c.reason}" for c in verdict.failures)
        )
    return manifest, verdict


def _directory(to: str) -> Path | None:
    if not to.startswith(FOLDER_PREFIX):
        return None
    name = to.removeprefix(FOLDER_PREFIX)
    if not name:
        raise UserError("folder: wants a name, as in --to folder:release/my-model")
    if not name.isprintable():
        raise UserError(f"{to!a} holds characters that cannot be printed; give another folder")
    directory = Path(name).expanduser().resolve()
    if not directory.name:
        raise UserError(f"{to} is the root of a disk; give a folder, as in --to folder:release/my-model")
    return directory
