"""Publish an artifact that has passed the gate, to the Hub or into a folder; any other artifact is refused.

`bundle.py` collects the files of a release, `card.py` writes its card; `hub/` and `folder_target.py` publish
them.
"""

from dataclasses import replace
from pathlib import Path

from ...base.errors import UserError
from ...serving_check.evidence.verdict import Verdict
from ..publishing.bundle import collect_bundle
from ..publishing.card import write_card
from ..publishing.examination import examine
from ..publishing.folder_target import preview_folder, publish_to_folder
from ..publishing.push_result import PushResult
from ..records.artifact import Artifact

FOLDER_PREFIX = "folder:"


def push(
    artifact: str | Path,
    to: str,
    *,
    private: bool = False,
    create_pr: bool = False,
    revision: str | None = None,
    allow_unjudged_speed: bool = False,
    dry_run: bool = False,
    progress: bool = True,
) -> PushResult:
    """Publish the folder `artifact` to `to`: a Hub repository `ORG/NAME`, or `folder:DIR`.

    allow_unjudged_speed: publish even if the machine that judged the artifact emulates the format and so
                          cannot judge its speed; the card's first line then says so

    With `dry_run` nothing is changed anywhere, and the result lists what would be done; the Hub's files are
    looked up only if there are a token and a network.
    """
    folder = Path(artifact).expanduser()
    directory = target_folder(to)
    _refuse_hub_options(directory, private, create_pr, revision)
    manifest, verdict = require_passing_verdict(folder)
    if verdict.speed_not_judged and not allow_unjudged_speed:
        raise UserError(
            f"the verdict on {folder} proves quality but not speed, so the artifact is not published. Speed "
            f"was not judged: {verdict.speed_not_judged}.\nTo publish the artifact anyway, give "
            '--allow-unjudged-speed; the model card then begins with "Speed was not judged"'
        )
    if directory is not None:
        if directory.resolve().is_relative_to(folder.resolve()):
            raise UserError(f"{directory} lies in the artifact itself; give a folder elsewhere")
        card = write_card(folder, manifest, verdict, directory.name, to)
        files = collect_bundle(folder, manifest, verdict, card)
        if dry_run:
            return replace(preview_folder(files, directory), gate=_said(verdict), card=card)
        return publish_to_folder(files, directory, progress)

    from ..publishing.hub.publish import HubTarget, preview_hub, publish_to_hub

    target = HubTarget(to, private, create_pr, revision)
    card = write_card(folder, manifest, verdict, to, to)
    files = collect_bundle(folder, manifest, verdict, card)
    if dry_run:
        return replace(preview_hub(files, target, folder), gate=_said(verdict), card=card)
    title = f"Release of {manifest.source}, quantized"
    return publish_to_hub(files, target, folder, title, progress)


def check_target(
    artifact: Path, to: str, private: bool = False, create_pr: bool = False, revision: str | None = None
) -> None:
    """Refuse a target that `push` would refuse for any artifact; nothing is written."""
    directory = target_folder(to)
    _refuse_hub_options(directory, private, create_pr, revision)
    if directory is not None:
        preview_folder([], directory)
        return
    from ..publishing.hub.publish import HubTarget, check_hub

    check_hub(HubTarget(to, private, create_pr, revision), artifact)


def check_card(repo_id: str, card: str) -> None:
    """Refuse front matter of a card that the Hub would refuse."""
    from ..publishing.hub.publish import check_front_matter

    check_front_matter(repo_id, card)


def _said(verdict: Verdict) -> str:
    """Return the verdict in a few words, `pass: …`, if it may be published."""
    ratios = [point.ratio for point in verdict.curve if point.ratio is not None]
    least = f", at least {min(ratios):.2f} of the baseline's throughput" if ratios else ""
    if verdict.speed_not_judged:
        least = "; speed was not judged"
    return f"{verdict.status} on {verdict.created}, {len(verdict.checks)} checks of these bytes{least}"


def _refuse_hub_options(directory: Path | None, private: bool, create_pr: bool, revision: str | None) -> None:
    if directory is not None and (private or create_pr or revision is not None):
        raise UserError(
            "--private, --create-pr and --revision apply to the Hub only; leave them out for a folder"
        )


def require_passing_verdict(folder: Path) -> tuple[Artifact, Verdict]:
    """Return the manifest and the verdict in `folder`.

    UserError is raised unless all its records hold together, the verdict is a pass that follows from its raw
    figures, given for exactly these bytes, and no weaker than the release policy.
    """
    found = examine(folder, Artifact.read(folder))
    for finding in found.findings:
        if finding.holds == "no" or (found.verdict is None and finding.name == "verdict"):
            raise UserError(finding.said)
    verdict = found.verdict
    if verdict is None:
        raise UserError(f"{folder} has no verdict; run `pipeline validate {folder}`")
    if verdict.status != "pass":
        raise UserError(
            f"the verdict on {folder} is {verdict.status}, so it is not published:\n  "
            + "\n  ".join(f"{c.name}: {c.measured}, bound {c.bound}. {c.reason}" for c in verdict.failures)
        )
    if verdict.exploratory:
        raise UserError(
            f"the verdict on {folder} is exploratory, so it is not published:\n  "
            + "\n  ".join(verdict.exploratory)
            + f"\nRun `pipeline validate {folder}` with its defaults, or lower the policy openly in the "
            'recipe (README, "The release policy")'
        )
    return found.manifest, verdict


def target_folder(to: str) -> Path | None:
    """Return the folder that `to` names; None if it names a Hub repository."""
    if not to.startswith(FOLDER_PREFIX):
        return None
    name = to.removeprefix(FOLDER_PREFIX)
    if not name:
        raise UserError("folder: needs a name, as in --to folder:release/my-model")
    if not name.isprintable():
        raise UserError(f"{to!a} holds characters that cannot be printed; give another folder")
    directory = Path(name).expanduser().resolve()
    if not directory.name:
        raise UserError(f"{to} is the root of a disk; give a folder, as in --to folder:release/my-model")
    return directory
