"""Reads a verdict back and judges it again from its raw figures, to find contradictions.

Reading a verdict detects edits, not forgeries: only a signature protects against made-up raw figures.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ...base.batch_invariance import TUNED
from ...base.errors import UserError
from ...base.installed import installed_version
from ...base.untrusted_files import read_json_object
from ..evidence.measurement import MeasuredM, Repeat
from ..evidence.verdict import SCHEMA_VERSION, Verdict
from ..settings import WorkloadSettings
from .judge import Judgement, judge
from .policy import weaker

TOLERANCE = 1e-6
"""The relative tolerance of a recomputed figure: `exp` may round differently on another machine."""
WORDS = ("measured", "bound", "reason")


def claimed_by(verdict: Verdict) -> str:
    """Return the batch invariance that the artifact's server was started with; a server by URL claims
    none.
    """
    return str((verdict.environment.engine_options or {}).get("batch_invariance", TUNED))


def judged_again(verdict: Verdict) -> Verdict:
    """Return the verdict with the status, checks, curve and policy that follow from its raw figures."""
    found = _judged(verdict)
    weak = tuple(weaker(verdict))
    return replace(
        verdict,
        status=found.status,
        checks=found.checks,
        curve=found.curve,
        exploratory=weak,
        speed_not_judged=found.speed_not_judged,
    )


def parse_verdict(path: Path) -> Verdict:
    """Return the verdict as it is in the file. A file that is absent, not JSON, or not a verdict raises
    UserError.
    """
    if not path.exists():
        raise UserError(f"there is no {path}; run `pipeline validate {path.parent}` first")
    value = read_json_object(path, advice="validate again")
    if value.get("schema_version") != SCHEMA_VERSION:
        raise UserError(
            f"{path} has schema version {value.get('schema_version')}; "
            f"this Scalegate reads version {SCHEMA_VERSION}; validate again"
        )
    try:
        return Verdict.from_json(value)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UserError(f"{path} is not a verdict: {where}: {first['msg']}; validate again") from error


def contradictions(verdict: Verdict) -> list[str]:
    """Return statements of a verdict that do not follow from its raw figures, a line for each contradiction.

    The words of a check may differ if another version of Scalegate wrote them; its figures may not.
    """
    found = _judged(verdict)
    problems = _of_the_settings(verdict)
    problems += _of_the_checks(verdict, found)
    problems += [
        f"the curve at M={recorded.m} is not the one of its repeats"
        for recorded, again in zip(verdict.curve, found.curve, strict=False)
        if not _same(asdict(recorded), asdict(again))
    ]
    if len(verdict.curve) != len(found.curve):
        problems.append(f"the curve has {len(verdict.curve)} points, the repeats give {len(found.curve)}")
    if _same_version(verdict) and list(verdict.exploratory) != (again := weaker(verdict)):
        problems.append(
            f"it says it is weaker than the policy in {len(verdict.exploratory)} ways, "
            f"its settings in {len(again)}"
        )
    if (verdict.speed_not_judged is None) != (found.speed_not_judged is None):
        problems.append("it and its servers contradict each other on whether speed was judged")
    if verdict.status != found.status:
        problems.append(f"it says {verdict.status}, its figures say {found.status}")
    return problems


def _judged(verdict: Verdict) -> Judgement:
    """Judge the verdict's raw figures; raise UserError if no gate could have measured them."""
    try:
        return judge(verdict.evidence, verdict.workload, verdict.bounds)
    except (ArithmeticError, ValueError, LookupError, TypeError) as error:
        raise UserError(f"a verdict's raw figures cannot be judged: {error}; validate again") from error


def _of_the_checks(verdict: Verdict, found: Judgement) -> list[str]:
    names, again = [[check.name for check in checks] for checks in (verdict.checks, found.checks)]
    if names != again:
        changed = sorted(set(names) ^ set(again)) or names
        return [f"its checks are not the gate's: {', '.join(changed)}"]
    problems = []
    is_same_version = _same_version(verdict)
    for recorded, check in zip(verdict.checks, found.checks, strict=True):
        if recorded.status != check.status:
            problems.append(f"{check.name} says {recorded.status}, its figures say {check.status}")
        elif not _same(dict(recorded.figures), dict(check.figures)):
            problems.append(f"the figures of {check.name} are not those that were measured")
        elif is_same_version and any(getattr(recorded, word) != getattr(check, word) for word in WORDS):
            problems.append(f"the words of {check.name} are not those of its figures")
    return problems


def _of_the_settings(verdict: Verdict) -> list[str]:
    """Yield contradictions between the repeats and the workload's settings."""
    problems = []
    measured, workload = verdict.evidence.measured, verdict.workload
    if tuple(level.m for level in measured) != workload.measured_ms:
        problems.append("its repeats are at other Ms than its workload asks for, or its seed draws")
    for level in measured:
        short = [repeat for block in level.prompt_blocks for repeat in (*block.artifact, *block.baseline)]
        if (
            level.rounds > workload.max_blocks
            or not all(_as_asked(repeat, level.m, workload) for repeat in (*level.artifact, *level.baseline))
            or not all(_as_asked(repeat, level.m, workload.with_short_answers) for repeat in short)
        ):
            problems.append(f"the repeats at M={level.m} do not match its workload")
        elif verdict.status == "pass" and not _is_whole(level):
            problems.append(f"M={level.m} was not measured completely")
    problems += _of_the_claim(verdict)
    in_use = verdict.evidence.in_use
    if in_use is not None and in_use.profile is not None and in_use.profile.name != workload.profile:
        problems.append("its requests are of another profile of loads than its workload asks for")
    if verdict.quality_tokens != verdict.evidence.quality.tokens:
        problems.append("quality was measured on another number of tokens than it says")
    if (verdict.quality_text is None) != (verdict.evidence.quality_of_given is None):
        problems.append("it names a text that it has no figures of, or has figures of a text without a name")
    return problems


def _of_the_claim(verdict: Verdict) -> list[str]:
    """Yield contradictions between the claimed batch invariance and its figures."""
    claim, company = claimed_by(verdict), verdict.evidence.company
    proved = TUNED if company is None else company.claim
    if proved == claim:
        return []
    return [f"its server claims to be {claim}, its figures are of one that claims to be {proved}"]


def _same_version(verdict: Verdict) -> bool:
    return verdict.environment.versions.get("scalegate") == installed_version("scalegate")


def _as_asked(repeat: Repeat, m: int, workload: WorkloadSettings) -> bool:
    answered, output_len = repeat.requests - len(repeat.errors), workload.at(m).output_len
    most = repeat.requests * output_len
    return repeat.requests == m * workload.waves and answered * output_len <= repeat.output_tokens <= most


def _is_whole(measured: MeasuredM) -> bool:
    blocks = measured.of_prompts.blocks
    return bool(measured.blocks) and all(len(block.artifact) == len(block.baseline) == 1 for block in blocks)


def _same(left: Any, right: Any) -> bool:
    """Say whether two values are equal, except for the last digits of a float, and for tuples that JSON
    turned into lists.
    """
    if isinstance(left, float) and isinstance(right, float | int):
        return math.isclose(left, right, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return left.keys() == right.keys() and all(_same(left[key], right[key]) for key in left)
    if isinstance(left, Sequence) and isinstance(right, Sequence) and not isinstance(left, str):
        return len(left) == len(right) and all(map(_same, left, right))
    return bool(left == right)
