"""Whether a folder's records hold together: its files, its manifest, its verdict, its report, its signature.

Findings are in an order in which each finding rests on earlier ones. `push` obeys the findings; `inspect` and
`verify` show them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ...base.atomic_files import PARTIAL_SUFFIX
from ...base.errors import UserError
from ...base.untrusted_names import file_refusal, require_file
from ...serving_check.evidence.verdict import Verdict
from ...serving_check.gate.policy import declared_by
from ...serving_check.gate.record import claimed_by, contradictions, judged_again, parse_verdict
from ..checkpoints.companion_files import refuse_strangers
from ..records.artifact import REPORT_FOLDER, SIGNATURE_NAME, VERDICT_NAME, Artifact
from ..records.file_digests import sha256_of
from ..records.signature import Signature, check_signature

SHOWN = 10

BOUND = {
    "bytes": "the verdict was given on these files",
    "verdict": "as it was given",
    "layout plan": "the one that was served",
    "manifest": "as it was when the verdict was given",
    "recipe": "sets the bounds that the verdict was given under",
    "rival": "served beside the artifact where the recipe names one",
    "invariance": "served as the recipe claims",
}
"""For each thing that the verdict is bound to, the words for a valid binding."""

Holds = Literal["yes", "no", "unknown"]


@dataclass(frozen=True)
class Finding:
    """One thing that was checked."""

    name: str
    holds: Holds
    said: str
    """What holds; or what does not hold, where, and what to do."""


@dataclass
class Examination:
    """The findings in a folder; `verdict` is None if none can be read."""

    folder: Path
    manifest: Artifact
    verdict: Verdict | None = None
    """The verdict, with checks, curve and status as they follow from its raw figures."""
    signature: Signature = field(default_factory=lambda: Signature("unsigned"))
    findings: list[Finding] = field(default_factory=list)
    changed_files: list[str] = field(default_factory=list)
    """One line for each difference between the manifest and the folder."""

    @property
    def broken(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.holds == "no"]


def examine(folder: Path, manifest: Artifact, signers: Path | None = None) -> Examination:
    """Hash every file of `folder`, whose manifest is given, and compare its records with one another."""
    found = Examination(folder, manifest)
    found.findings.append(_files(found))
    found.findings.append(_kinds(found))
    path = folder / VERDICT_NAME
    if not path.is_file():
        said = f"{folder} has no verdict ({VERDICT_NAME}); nothing is published without one. {_run(folder)}"
        found.findings.append(Finding("verdict", "unknown", said))
        return found
    try:
        verdict = parse_verdict(require_file(folder, VERDICT_NAME))
        found.verdict = judged_again(verdict)
    except UserError as error:
        found.findings.append(Finding("verdict", "no", error.message))
        return found
    found.findings += _binding(found.manifest, verdict, path)
    found.findings.append(_report(folder, verdict))
    found.findings.append(_figures(path, verdict))
    found.findings.append(_signature(found, path, signers))
    return found


def _files(found: Examination) -> Finding:
    changed = found.changed_files = found.manifest.changed_files(found.folder)
    if not changed:
        return Finding("files", "yes", f"{len(found.manifest.files)} files are as the manifest records them")
    said = "\n  ".join(changed[:SHOWN])
    return Finding(
        "files",
        "no",
        f"{found.folder} is not what was quantized and validated:\n  {said}\n"
        f"Restore these files, or quantize again and {_lower(_run(found.folder))}",
    )


def _kinds(found: Examination) -> Finding:
    try:
        refuse_strangers(found.folder, found.manifest.files, found.manifest.recipe.get("files"))
    except UserError as error:
        return Finding("kinds of files", "no", error.message)
    return Finding("kinds of files", "yes", "every file is of a kind that is published")


def _binding(manifest: Artifact, verdict: Verdict, path: Path) -> Iterator[Finding]:
    """Find whether the verdict was given on these bytes and this manifest, and is the verdict that the
    manifest names.
    """
    folder, given = path.parent, verdict.artifact
    problems = {
        "bytes": given.bytes_digest != manifest.bytes_digest()
        and f"{path} is a verdict on other bytes ({given.name}, digest {given.bytes_digest[:12]}; these are "
        f"{manifest.bytes_digest()[:12]})",
        "verdict": (
            f"{folder}'s manifest names no verdict: {VERDICT_NAME} is from before the layout plan changed, "
            "or was put there by hand"
            if manifest.verdict_sha256 is None
            else manifest.verdict_sha256 != sha256_of(path) and f"{path} was edited after it was given"
        ),
        "layout plan": given.layout_plan_sha256 != manifest.layout_plan_sha256()
        and f"{folder} was laid out again after its verdict was given",
        "manifest": given.manifest_sha256 != manifest.sha256()
        and f"{folder}'s manifest was edited after its verdict was given: its recipe, its source, or what it "
        "says of the layers",
        "recipe": dict(verdict.declared) != declared_by(manifest.recipe)
        and f"{path} was given under other bounds than the recipe in the manifest sets",
        "rival": bool(manifest.recipe.get("rival"))
        and verdict.rival is None
        and f"the recipe names a rival, {manifest.recipe.get('rival')!r}, and {path} was given without one",
        "invariance": (served := claimed_by(verdict)) != manifest.batch_invariance()
        and f"the recipe claims batch invariance {manifest.batch_invariance()!r}, and {path} was given on a "
        f"server that was {served!r}",
    }
    for name, problem in problems.items():
        if problem:
            yield Finding(name, "no", f"{problem}. {_run(folder)}")
        else:
            yield Finding(name, "yes", BOUND[name])


def _report(folder: Path, verdict: Verdict) -> Finding:
    """Find whether the report's folder has exactly the pages and plots that the verdict names."""
    there = {
        path.relative_to(folder / REPORT_FOLDER).as_posix()
        for path in (folder / REPORT_FOLDER).rglob("*")
        if not (path.is_dir() and not path.is_symlink()) and not _is_passing(path)
    }
    problems = []
    for name in sorted(there | verdict.report.keys()):
        inside = f"{REPORT_FOLDER}/{name}"
        if name not in verdict.report:
            problems.append(f"{inside!a} was added; the verdict knows nothing of it")
        elif (reason := file_refusal(folder, inside)) is not None:
            problems.append(f"{inside!a}: {reason}")
        elif sha256_of(folder / inside) != verdict.report[name]:
            problems.append(f"{inside!a} was changed")
    if not problems:
        return Finding("report", "yes", f"{len(verdict.report)} files are those of the verdict")
    said = "; ".join(problems[:SHOWN])
    return Finding("report", "no", f"{said}. Remove what was added, or {_lower(_run(folder))}")


def _is_passing(path: Path) -> bool:
    """Say whether a file is never published and may be anywhere: a hidden or an unfinished file."""
    return path.name.startswith(".") or path.name.endswith(PARTIAL_SUFFIX)


def _figures(path: Path, verdict: Verdict) -> Finding:
    if problems := contradictions(verdict):
        return Finding(
            "figures",
            "no",
            f"{path} contradicts its own raw figures, so it was edited after it was given: "
            f"{'; '.join(problems[:3])}. {_run(path.parent)}",
        )
    return Finding("figures", "yes", f"{len(verdict.checks)} checks follow from the raw figures")


def _signature(found: Examination, path: Path, signers: Path | None) -> Finding:
    name = "signature"
    if not (found.folder / SIGNATURE_NAME).is_file():
        holds: Holds = "unknown" if signers is None else "no"
        return Finding(name, holds, "none: whoever wrote these records may have made them up")
    require_file(found.folder, SIGNATURE_NAME)
    found.signature = signature = check_signature(path, signers)
    if signature.state == "trusted":
        return Finding(name, "yes", f"by {signature.signer}, key {signature.key}")
    if signature.state == "good":
        return Finding(name, "yes", f"by the holder of key {signature.key}; --signers FILE says whose it is")
    if signature.state == "unknown signer":
        return Finding(name, "no", f"by key {signature.key}, which is not among the allowed signers")
    return Finding(
        name, "no", f"{SIGNATURE_NAME} does not fit {VERDICT_NAME}: {signature.problem}. Sign it again"
    )


def _run(folder: Path) -> str:
    return f"Run `pipeline validate {folder}`"


def _lower(sentence: str) -> str:
    return sentence[0].lower() + sentence[1:]
