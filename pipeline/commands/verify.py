"""Checks a release that anybody published: its files, its records, its figures, its policy and its signature.

Nothing is measured again; docs/publishing.md says what unsigned digests cannot prove.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...base.errors import UserError
from ...serving_check.evidence.verdict import Verdict
from ..checkpoints.download import download_checkpoint
from ..publishing.bundle import CARD_NAME
from ..publishing.card import write_card
from ..publishing.examination import Finding, Holds, examine
from ..records.artifact import MANIFEST_NAME, Artifact
from ..records.signature import Signature

ONLY_TOLD = "signature"
"""The check that may be unknown although the release holds."""


@dataclass(frozen=True)
class Verification:
    """The output of `pipeline verify`: a line for each thing that was checked."""

    model: str
    revision: str | None
    findings: tuple[Finding, ...]
    verdict: Verdict | None
    signature: Signature

    @property
    def holds(self) -> Holds:
        """Return `no` if any check fails, `unknown` if a check that counts cannot be decided, else `yes`.

        A missing signature is reported, but affects the result only if signers were given. A card that
        differs from the records' card is unknown: it may make claims that the records do not make.
        """
        found = {
            finding.holds for finding in self.findings if finding.name != ONLY_TOLD or finding.holds == "no"
        }
        return "no" if "no" in found else "unknown" if "unknown" in found else "yes"

    @property
    def exit_status(self) -> int:
        """Return the exit status as for the gate: 0 holds, 1 does not hold, 2 cannot be decided."""
        return {"yes": 0, "no": 1, "unknown": 2}[self.holds]

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "revision": self.revision,
            "holds": self.holds,
            "findings": [asdict(finding) for finding in self.findings],
            "signature": asdict(self.signature),
            "verdict": None if self.verdict is None else self.verdict.status,
        }


def verify(model: str | Path, revision: str | None = None, signers: str | Path | None = None) -> Verification:
    """Compare the records of `model`, a folder or a Hub id, with its files and with one another.

    signers: an allowed-signers file (`ssh-keygen(1)`); one of these signers must have signed the verdict
    """
    folder, commit = Path(model).expanduser(), None
    if not folder.is_dir():
        # Whatever lies there: a file that no engine should find is found here.
        folder, commit = download_checkpoint(str(model), revision, ignored=())
    elif revision is not None:
        raise UserError(f"{folder} is a folder; --revision is for Hub ids")
    if not (folder / MANIFEST_NAME).is_file():
        raise UserError(f"{model} has no {MANIFEST_NAME}: it is not a release of Scalegate's")
    found = examine(folder, Artifact.read(folder), None if signers is None else Path(signers))
    findings = [*found.findings]
    if found.verdict is not None:
        findings += _conclusions(found.verdict)
        target = str(model) if commit is not None else f"folder:{folder.resolve().name}"
        findings.append(_card(folder, found.manifest, found.verdict, target))
    return Verification(str(model), commit, tuple(findings), found.verdict, found.signature)


def _card(folder: Path, manifest: Artifact, verdict: Verdict, target: str) -> Finding:
    """Compare the card with the card that Scalegate makes from these records, since no digest covers the
    card.
    """
    try:
        card = write_card(folder, manifest, verdict, target.removeprefix("folder:"), target)
        same = (folder / CARD_NAME).read_text(encoding="utf-8") == card
    except (OSError, ValueError, UserError):
        same = False
    if same:
        return Finding("card", "yes", f"{CARD_NAME} is what this Scalegate writes from these records")
    return Finding(
        "card",
        "unknown",
        f"{CARD_NAME} is not what this Scalegate writes from these records: it may say something else",
    )


def _conclusions(verdict: Verdict) -> list[Finding]:
    status: Holds = {"pass": "yes", "fail": "no", "inconclusive": "unknown"}[verdict.status]  # type: ignore[assignment]
    failed = ", ".join(check.name for check in verdict.failures)
    said = f"{verdict.status}, recomputed from its raw figures" + (f": {failed}" if failed else "")
    weak = "; ".join(verdict.exploratory)
    if verdict.speed_not_judged:
        weak = f"speed was not judged: {verdict.speed_not_judged}" + (
            f"; exploratory: {weak}" if weak else ""
        )
    elif weak:
        weak = f"exploratory: {weak}"
    return [
        Finding("policy", "unknown", weak)
        if weak
        else Finding("policy", "yes", "no weaker than the release policy, as the recipe declares it"),
        Finding("status", status, said),
    ]
