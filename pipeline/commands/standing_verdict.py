"""Whether an artifact's existing verdict satisfies this release, or the artifact must be measured again."""

import json
from dataclasses import replace
from pathlib import Path

from ...base.option_fields import flag
from ...serving_check.adapters.placement import PLACEMENT
from ...serving_check.engine.options import AUTO
from ...serving_check.evidence.verdict import Verdict
from ...serving_check.gate.policy import declared_by
from ..checkpoints.checkpoint import open_checkpoint
from ..publishing.examination import examine
from ..records.artifact import Artifact
from ..validation.options import ValidateOptions
from ..validation.rival import describe_rival
from ..validation.servers import effective_options, sized_options, with_recorded_contexts
from ..validation.task_scores import public_tasks
from .release_request import ReleaseRequest


def standing_pass(folder: Path, rival: str | None, request: ReleaseRequest) -> tuple[Verdict | None, str]:
    """Return a passing verdict that satisfies this request, or the reason why there is none."""
    examination = examine(folder, Artifact.read(folder))
    verdict = examination.verdict
    if verdict is None:
        return None, "there was no verdict"
    if examination.broken:
        broken = ", ".join(finding.name for finding in examination.broken)
        return None, f"the verdict there does not hold: {broken}"
    why_not = _other_question(verdict, examination.manifest, rival, request)
    if why_not is None and verdict.status != "pass":
        why_not = f"was {verdict.status}"
    if why_not is None and verdict.exploratory:
        why_not = "is exploratory"
    if why_not is None and verdict.speed_not_judged and not request.publication.allow_unjudged_speed:
        why_not = "did not judge speed"
    if why_not is None and request.validation.sign is not None and examination.signature.state == "unsigned":
        why_not = "is not signed"
    return (verdict, "") if why_not is None else (None, f"the verdict there {why_not}")


def _other_question(
    verdict: Verdict, manifest: Artifact, rival: str | None, request: ReleaseRequest
) -> str | None:
    """Return the first setting in which the verdict differs from the request; None if they agree."""
    asked = request.validation
    workload = request.workload
    if request.given.get("seed") is None:
        workload = replace(workload, seed=verdict.workload.seed)
    if verdict.workload != workload:
        return "was given under another workload"
    if verdict.bounds != request.bounds(declared_by(manifest.recipe)):
        return "was given with other bounds"
    if not _is_beside(verdict, rival, asked.rival_revision):
        return "was given beside another rival"
    if _text_asked(asked) != (verdict.quality_text, verdict.quality_tokens_asked):
        return "was given on another held-out text"
    if verdict.tasks != public_tasks(asked.tasks):
        return "has the scores of other tasks"
    engines = verdict.environment.engine, verdict.environment.baseline_engine
    if engines != (asked.engine, asked.baseline_engine or engines[1]):
        return "was given on another engine"
    if changed := changed_options(verdict, request):
        return f"was given with another {', '.join(map(flag, changed))}"
    return None


def _is_beside(verdict: Verdict, rival: str | None, revision: str | None) -> bool:
    """Say whether the request names the same rival as `verdict`, or both name none."""
    if rival is None or verdict.rival is None:
        return rival is None and verdict.rival is None
    return describe_rival(open_checkpoint(rival, revision)).bytes_digest == verdict.rival.bytes_digest


def _text_asked(asked: ValidateOptions) -> tuple[str | None, int]:
    return (None if asked.text is None else asked.text.name), asked.quality_tokens


def changed_options(verdict: Verdict, request: ReleaseRequest) -> list[str]:
    """Return engine options whose requested values differ from the verdict's."""
    recorded = verdict.environment.engine_options
    if recorded is None:
        return []
    recorded_places = {name: value for name, value in recorded.items() if name in PLACEMENT}
    sides = 2 if verdict.rival is None else 3
    # JSON has lists for tuples.
    places = json.loads(json.dumps(request.placement.for_servers(sides).asked_for()))
    if json.loads(json.dumps(recorded_places)) != places:
        return sorted(recorded_places.keys() ^ places.keys()) or sorted(recorded_places)
    workload = request.workload
    options = with_recorded_contexts(
        sized_options(request.given, workload), request.given, recorded, workload.profile
    )
    if options.device == AUTO:
        options = replace(options, device=str(recorded.get("device", AUTO)))
    return [
        name
        for name, value in effective_options(options).items()
        if name in recorded and value not in (AUTO, recorded[name])
    ]
