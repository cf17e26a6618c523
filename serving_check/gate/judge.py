"""Judges a gate run: every check, the curve and the status, from its raw figures alone.

Judging is a pure function, called when a verdict is given and again whenever one is read (`record.py`).
"""

from dataclasses import dataclass, replace

from ..checks.batch_invariance import check_batch_invariance
from ..checks.canary import check_canary
from ..checks.compilations import check_compilations
from ..checks.failures import check_failures
from ..checks.in_use.as_asked import check_as_asked
from ..checks.in_use.at_rest import check_at_rest
from ..checks.in_use.drift import check_drift
from ..checks.in_use.logprobs import check_logprobs
from ..checks.in_use.profile import check_profile
from ..checks.in_use.sampling import check_sampling
from ..checks.in_use.speed import check_speed_in_use, scatter_of
from ..checks.in_use.text import check_text_in_use
from ..checks.kv_capacity import check_kv_capacity
from ..checks.latency import check_latency
from ..checks.loads import check_loads
from ..checks.other_readers import check_other_readers
from ..checks.part_throughput import check_decode_throughput, check_prompt_throughput
from ..checks.plausible import check_plausible
from ..checks.quality import check_quality
from ..checks.reached import check_reached
from ..checks.received import check_received
from ..checks.rival import check_rival
from ..checks.served_text import check_served_text
from ..checks.stalls import check_stalls
from ..checks.streamed import check_streamed
from ..checks.text_files import check_text_files
from ..checks.throughput import check_throughput
from ..checks.undisturbed import check_undisturbed
from ..checks.weights import check_weights, largest_errors
from ..evidence.curve import curve_of, took_turns
from ..evidence.emulation import why_not_judged
from ..evidence.evidence import Evidence
from ..evidence.verdict import CheckResult, CurvePoint, Status, overall_status
from ..settings import Bounds, WorkloadSettings
from .unjudged import unjudged_checks, unjudged_curve


@dataclass(frozen=True)
class Judgement:
    """The result that follows from the evidence."""

    status: Status
    checks: tuple[CheckResult, ...]
    curve: tuple[CurvePoint, ...]
    speed_not_judged: str | None = None
    """Why not, if a server emulated the format of its inputs."""


def judge(evidence: Evidence, workload: WorkloadSettings, bounds: Bounds) -> Judgement:
    """Return every check, in the order in which they are shown; each check is a pure function of its
    arguments.
    """
    curve = curve_of(evidence.measured, workload, bounds)
    in_turns = all(took_turns(level) for level in evidence.measured)
    broken_off = next(
        (level.m for level in evidence.measured if any(block.errors for block in level.blocks)), None
    )
    blocks = () if evidence.in_use is None else evidence.in_use.blocks
    all_blocks = () if evidence.in_use is None else evidence.in_use.all_blocks
    checks = (
        check_loads(evidence.loaded, evidence.baseline_loaded, *evidence.packed),
        check_weights(evidence.weights),
        check_text_files(evidence.texts),
        check_other_readers(evidence.readers),
        check_canary(evidence.canary, evidence.baseline_canary, bounds),
        check_quality(
            evidence.quality,
            bounds,
            largest_errors(evidence.weights),
            evidence.by_layers,
            evidence.quality_by_domain,
            evidence.quality_of_given,
            evidence.foreign_domains,
        ),
        check_served_text(evidence.answers, evidence.measured, bounds),
        check_failures(evidence.measured, all_blocks),
        check_received(evidence.measured),
        check_reached(curve, bounds.min_reached, evidence.limit),
        check_throughput(
            curve, bounds.throughput_floor, evidence.diagnoses, workload.max_blocks, broken_off, in_turns
        ),
        *(
            [check_decode_throughput(curve, bounds.throughput_floor, evidence.diagnoses)]
            if workload.decoding_apart or any(point.steady for point in curve)
            else []
        ),
        *(
            [check_prompt_throughput(curve, bounds.throughput_floor)]
            if any(point.prompts for point in curve)
            else []
        ),
        check_plausible(curve, evidence.loaded, evidence.baseline_loaded, evidence.repeated, bounds),
        check_streamed(curve),
        check_latency(evidence.measured, bounds),
        check_stalls(evidence.measured, bounds, evidence.together, blocks),
        check_kv_capacity(
            curve, workload, evidence.capacity, evidence.limit, bounds.min_reached, evidence.request_memory
        ),
        check_compilations(*evidence.compiled),
        *_checks_in_use(evidence, workload, bounds),
        *([] if evidence.company is None else [check_batch_invariance(evidence.company)]),
        *([check_rival(curve, bounds.max_first_rival_m, workload.max_blocks)] if evidence.has_rival else []),
    )
    checks = unjudged_checks(checks, evidence.emulated)
    shown = unjudged_curve(curve, evidence.emulated)
    return Judgement(overall_status(checks), checks, shown, why_not_judged(evidence.emulated))


def _checks_in_use(evidence: Evidence, workload: WorkloadSettings, bounds: Bounds) -> list[CheckResult]:
    """Return the checks of a load as in use, and of the servers at rest after it; none if no such load was
    sent.
    """
    if evidence.in_use is None or evidence.at_rest is None:
        return []
    answers = evidence.in_use.answers
    return [
        check_undisturbed(evidence.alone, evidence.measured),
        check_speed_in_use(evidence.in_use.blocks, bounds, scatter_of(evidence.measured)),
        *(
            []
            if workload.profile is None
            else [check_profile(workload.profile, evidence.in_use.profile, bounds)]
        ),
        check_as_asked(replace(evidence.in_use, blocks=evidence.in_use.all_blocks)),
        check_text_in_use(answers, bounds),
        check_sampling(answers),
        check_logprobs(answers),
        check_at_rest(evidence.at_rest),
        check_drift(evidence.at_rest),
    ]
