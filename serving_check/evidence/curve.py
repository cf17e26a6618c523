"""The curve of throughput against M, artifact over baseline, from the measured repeats.

The module is arithmetic only: the same repeats and settings give the same curve, on any machine.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median

from ..settings import Bounds, WorkloadSettings
from ..statistics.decide import LOOKS, Decision, SequentialTest, decide, decide_all, is_hopeless
from ..workload import percentile
from ..workload.engine_work import EngineWork
from .measurement import (
    MeasuredM,
    Repeat,
    decoding_throughput,
    output_throughput,
    prompts_per_second,
)
from .parts import parts_apart, prompt_share
from .verdict import CurvePoint, PartPoint, RivalPoint, ServingFigures, finite

Figure = Callable[[Repeat], float | None]


def sequential_test(
    measured: Sequence[MeasuredM], workload: WorkloadSettings, floor: float
) -> SequentialTest:
    """Return the test of each M. How many figures are decided is fixed at the first look, after the first few
    blocks.
    """
    parts = sum(parts_apart(level, workload).count for level in measured)
    count = len(workload.measured_ms) + parts
    return SequentialTest(floor, number_of_ms=count, max_blocks=workload.max_blocks)


def curve_of(measured: Sequence[MeasuredM], workload: WorkloadSettings, bounds: Bounds) -> list[CurvePoint]:
    """Return a point for every M at which both sides finished a repeat."""
    decisions = decisions_of(measured, workload, bounds.throughput_floor)
    voting = rival_decisions_of(measured, workload, bounds.max_first_rival_m)
    steady = steady_decisions_of(measured, workload, bounds.throughput_floor)
    prompts = prompt_decisions_of(measured, workload, bounds.throughput_floor)
    return [
        replace(
            curve_point(level, decision),
            drawn=level.m not in workload.ms,
            rival=rival_point(level, voting.get(level.m), workload),
            steady=part_point(level, steady.get(level.m), decoding_throughput),
            prompts=part_point(
                level, prompts.get(level.m), prompts_per_second, workload.at(level.m).input_len
            ),
            prompt_share=prompt_share(level),
        )
        for level, decision in zip(measured, decisions, strict=True)
        if level.artifact and level.baseline
    ]


RIVAL_FLOOR = 1.0
"""The artifact's throughput over the rival's, which its lower confidence limit must reach."""


def rival_decisions_of(
    measured: Sequence[MeasuredM], workload: WorkloadSettings, from_m: float
) -> dict[int, Decision]:
    """Return the decision whether the artifact is faster than the rival, at each given M from `from_m` on."""
    voting = [level for level in measured if level.m >= from_m and level.m in workload.ms]
    if not voting:
        return {}
    # It only has to be faster, so a wide interval is enough.
    test = SequentialTest(RIVAL_FLOOR, len(voting), workload.max_blocks, widest=math.inf)
    if all(took_turns(level) for level in voting):
        groups = [level.group_means(output_throughput, over_rival=True) for level in voting]
        decisions = decide_all(groups, test.of_turns)
    else:
        ratios = [level.log_ratios(output_throughput, over_rival=True) for level in voting]
        decisions = decide_all(ratios, test)
    return {level.m: decision for level, decision in zip(voting, decisions, strict=True)}


def rival_point(
    measured: MeasuredM, decision: Decision | None, workload: WorkloadSettings
) -> RivalPoint | None:
    """Return the rival at one M; `decision` is None if the M does not count."""
    if not measured.rival:
        return None
    ratios = measured.log_ratios(output_throughput, over_rival=True)
    shown = decision or decide(ratios, SequentialTest(RIVAL_FLOOR, 1, workload.max_blocks))
    return RivalPoint(
        figures=serving_figures(measured.rival),
        ratio=finite(shown.ratio),
        ratio_low=finite(shown.shown[0]),
        ratio_high=finite(shown.shown[1]),
        status=None if decision is None else decision.status,
        decision_low=finite(shown.low),
        decision_high=finite(shown.high),
    )


def binding_decisions_of(
    measured: Sequence[MeasuredM], workload: WorkloadSettings, floor: float
) -> list[Decision]:
    """Return the decision that counts at every M, for whole requests, decoding or prompts alone: a failed one
    first, then an open one, then an undecided one, then the lowest one."""
    decisions = decisions_of(measured, workload, floor)
    steady = steady_decisions_of(measured, workload, floor)
    prompts = prompt_decisions_of(measured, workload, floor)
    return [
        min(
            (whole, *(part[level.m] for part in (steady, prompts) if level.m in part)),
            key=lambda decision: (
                decision.status != "fail",
                decision.final,
                decision.status == "pass",
                decision.ratio,
            ),
        )
        for level, whole in zip(measured, decisions, strict=True)
    ]


def steady_decisions_of(
    measured: Sequence[MeasuredM], workload: WorkloadSettings, floor: float
) -> dict[int, Decision]:
    """Return the decision on decoding alone, at every M at which it is judged separately."""
    levels = [level for level in measured if parts_apart(level, workload).decoding]
    test = sequential_test(measured, workload, floor)
    return _decided_by_m(levels, workload, test, decoding_throughput)


def prompt_decisions_of(
    measured: Sequence[MeasuredM], workload: WorkloadSettings, floor: float
) -> dict[int, Decision]:
    """Return the decision on prompts alone, at every M at which they are judged by themselves."""
    levels = [level.of_prompts for level in measured if parts_apart(level, workload).prompts]
    test = sequential_test(measured, workload, floor)
    return _decided_by_m(levels, workload, test, prompts_per_second)


def ms_open_for_prompts(
    measured: Sequence[MeasuredM], workload: WorkloadSettings, floor: float
) -> frozenset[int]:
    """Return the Ms at which all has passed except prompts, so that further blocks need no long answers."""
    whole = decisions_of(measured, workload, floor)
    steady = steady_decisions_of(measured, workload, floor)
    prompts = prompt_decisions_of(measured, workload, floor)
    return frozenset(
        level.m
        for level, decision in zip(measured, whole, strict=True)
        if level.m in prompts
        and not prompts[level.m].final
        and decision.status == "pass"
        and (level.m not in steady or steady[level.m].status == "pass")
    )


def _decided_by_m(
    levels: Sequence[MeasuredM], workload: WorkloadSettings, test: SequentialTest, figure: Figure
) -> dict[int, Decision]:
    """Return the decision on a figure at each M. The decision is final if repeats hardly ever have the
    figure: more blocks would not help."""
    decisions = _decided(levels, workload, test, figure)
    return {
        level.m: replace(decision, final=True)
        if len(level.blocks) >= LOOKS[0] and not level.shows(figure)
        else decision
        for level, decision in zip(levels, decisions, strict=True)
    }


def part_point(
    measured: MeasuredM, decision: Decision | None, figure: Figure, unit: float = 1.0
) -> PartPoint | None:
    """Return the figures of one part at one M; None if it is not judged separately. unit: the name of the
    figure's unit"""
    if decision is None:
        return None
    ours, theirs = (
        _median([figure(repeat) for repeat in repeats]) for repeats in (measured.artifact, measured.baseline)
    )
    return PartPoint(
        artifact=None if ours is None else ours * unit,
        baseline=None if theirs is None else theirs * unit,
        ratio=finite(decision.ratio),
        ratio_low=finite(decision.shown[0]),
        ratio_high=finite(decision.shown[1]),
        status=decision.status,
        decision_low=finite(decision.low),
        decision_high=finite(decision.high),
    )


def decisions_of(measured: Sequence[MeasuredM], workload: WorkloadSettings, floor: float) -> list[Decision]:
    """Return the decision at every M; a hopelessly slow M has failed after two blocks.

    Servers that take turns are given more blocks: their first blocks share a start, which may have been a bad
    one. Drawn Ms are given more blocks too, since their repeats are a quarter as long: with noise of 20% one
    in twenty sound servers would fail there.
    """
    test = sequential_test(measured, workload, floor)
    decisions = _decided(measured, workload, test, output_throughput)
    if any(took_turns(level) for level in measured):
        return decisions
    return [
        replace(decision, status="fail", final=True)
        if decision.status == "inconclusive"
        and level.m in workload.ms
        and is_hopeless(level.first_looks, floor)
        else decision
        for level, decision in zip(measured, decisions, strict=True)
    ]


def _decided(
    measured: Sequence[MeasuredM],
    workload: WorkloadSettings,
    test: SequentialTest,
    figure: Figure,
) -> list[Decision]:
    """Return the decisions from the blocks on the first servers or, if there are any, from groups on
    restarted servers; from groups alone if servers take turns. Drawn Ms, of which less is known, pass by
    their estimate."""
    drawn = {index for index, level in enumerate(measured) if level.m not in workload.ms}
    groups = [level.group_means(figure) for level in measured]
    if any(took_turns(level) for level in measured):
        return decide_all(groups, test.of_turns, drawn)
    first = [
        replace(level, blocks=[block for block in level.blocks if not block.restarts]).log_ratios(figure)
        for level in measured
    ]
    decisions = decide_all(first, test, drawn)
    if any(groups):
        # An M that was decided before has no groups.
        grouped = decide_all(groups, test.of_groups, drawn)
        decisions = [
            new if means else old for old, new, means in zip(decisions, grouped, groups, strict=True)
        ]
    return decisions


def took_turns(measured: MeasuredM) -> bool:
    """Say whether no two servers were up together while the evidence was measured."""
    return bool(measured.blocks) and all(block.restarts for block in measured.blocks)


def curve_point(measured: MeasuredM, decision: Decision) -> CurvePoint:
    return CurvePoint(
        m=measured.m,
        artifact=serving_figures(measured.artifact),
        baseline=serving_figures(measured.baseline),
        ratio=finite(decision.ratio),
        ratio_low=finite(decision.shown[0]),
        ratio_high=finite(decision.shown[1]),
        status=decision.status,
        log_ratios=tuple(measured.log_ratios(output_throughput)),
        correlation=decision.correlation,
        decision_low=finite(decision.low),
        decision_high=finite(decision.high),
    )


def serving_figures(results: Sequence[Repeat]) -> ServingFigures:
    """Return the figures of one side at one M: medians over repeats, percentiles over requests, extremes of
    samples.
    """
    ttfts = [value * 1000 for result in results for value in result.ttfts]
    tpots = [value * 1000 for result in results for value in result.tpots]
    preemptions = [result.preemptions for result in results if result.preemptions is not None]
    engine = EngineWork.sum(result.engine for result in results)
    return ServingFigures(
        output_throughput=median(result.output_throughput for result in results),
        repeats=tuple(result.output_throughput for result in results),
        ttft_p50_ms=percentile(ttfts, 50),
        ttft_p99_ms=percentile(ttfts, 99),
        tpot_p50_ms=percentile(tpots, 50),
        tpot_p99_ms=percentile(tpots, 99),
        running_mean=median(result.decoding_together for result in results),
        waiting_max=_largest([result.waiting_max for result in results]),
        kv_usage_max=_largest([result.kv_usage_max for result in results]),
        preemptions=sum(preemptions) if preemptions else None,
        requests=sum(result.requests for result in results),
        failed_requests=sum(len(result.errors) for result in results),
        waiting_mean=engine.waiting_mean,
        step_ms=engine.step_ms,
        host_ms=engine.host_ms,
        device_idle_share=engine.device_idle_share,
        streamed_share=_median([result.streamed_share for result in results]),
        itl_p999_ms=_milliseconds(_median([result.itl_p999 for result in results])),
        itl_max_ms=_milliseconds(_largest([result.itl_max for result in results])),
    )


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1000


def _largest(values: Sequence[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)
