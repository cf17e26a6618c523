"""Each check, passing and failing, on load results made of plain numbers."""

import math
from dataclasses import replace

import pytest
from scalegate.base.errors import UserError
from scalegate.layouts.choosing.plan import LayoutPlan, Measurement, ShapeChoice
from scalegate.serving_check.adapters.prometheus_text import parse_metrics
from scalegate.serving_check.checks.canary import Continuation, check_canary, scored
from scalegate.serving_check.checks.compilations import check_compilations, compilations
from scalegate.serving_check.checks.diagnosis import diagnose
from scalegate.serving_check.checks.failures import check_failures
from scalegate.serving_check.checks.kv_capacity import check_kv_capacity, require_capacity
from scalegate.serving_check.checks.latency import check_latency
from scalegate.serving_check.checks.loads import check_loads
from scalegate.serving_check.checks.quality import check_quality
from scalegate.serving_check.checks.reached import check_reached
from scalegate.serving_check.checks.throughput import RUNS_TO_MISS, check_throughput
from scalegate.serving_check.evidence.curve import curve_point
from scalegate.serving_check.evidence.evidence import ModelFigures
from scalegate.serving_check.evidence.measurement import MeasuredM, decoding_together
from scalegate.serving_check.evidence.quality_figures import Comparison
from scalegate.serving_check.evidence.request_memory import RequestMemory
from scalegate.serving_check.evidence.verdict import CurvePoint, overall_status
from scalegate.serving_check.gate.judge import judge
from scalegate.serving_check.settings import Bounds, WorkloadSettings
from scalegate.serving_check.statistics.decide import (
    GROUP,
    LEAST_FOR_GROUPS,
    SHOWN_ERROR,
    WIDEST,
    WIDEST_IF_FASTER,
    SequentialTest,
    decide,
)
from scalegate.serving_check.statistics.trimmed_mean import (
    VALUES_PER_TRIM,
    _student_t_tail,
    student_t_quantile,
)

from ..gate_samples import load_result, measured_m, sample_evidence, sample_verdict

BOUNDS = Bounds()
SAME = Comparison(8192, 1.5, 1.5, 0.0, 0.0, 0.0, 0.0, 1.0)
SHAPE = "int4 g128 zp 768x256 bfloat16"


def plan_with(curves: dict[str, dict[int, float]], layout: str) -> LayoutPlan:
    """One shape, two layers; µs by layout and M, where the unquantized product takes 100 at every M."""
    measurements = tuple(
        Measurement(name, f"{name}_kernel", m, us, 100.0)
        for name, curve in curves.items()
        for m, us in curve.items()
    )
    return LayoutPlan("a device", {}, (ShapeChoice(SHAPE, layout, ("up", "gate"), measurements),))


SLOW_AND_FAST = {"slow": {1: 50.0, 8: 400.0}, "fast": {1: 80.0, 8: 90.0}, "half": {1: 40.0, 8: 150.0}}


def test_a_diagnosis_names_shape_kernel_m_and_the_layout_that_would_have_passed():
    found = diagnose(plan_with(SLOW_AND_FAST, "fast"), {"up": "slow", "gate": "slow"}, 8, 0.93)
    for part in (
        SHAPE,
        "layout slow, kernel slow_kernel",
        "M=8",
        "floor 0.93",
        "Layout fast would have passed",
        f"on their own: {SHAPE} (slow) from M=8.",
    ):
        assert part in found


def test_a_diagnosis_does_not_promise_a_layout_that_would_fail_at_another_m():
    curves = {name: SLOW_AND_FAST[name] for name in ("slow", "half")}
    found = diagnose(plan_with(curves, "slow"), {}, 8, 0.93)
    assert "would have passed" not in found
    assert "least slow is half" in found


def test_a_diagnosis_acquits_layers_that_are_fast_enough():
    found = diagnose(plan_with(SLOW_AND_FAST, "fast"), {}, 8, 0.93)
    assert SHAPE not in found
    assert "elsewhere" in found
    between = diagnose(plan_with(SLOW_AND_FAST, "fast"), {}, 5, 0.93)
    assert "at M=5 none was measured by itself" in between and "elsewhere" not in between


def test_a_server_that_runs_22_of_82_requests_is_caught_at_a_glance():
    point = sample_verdict({82: 1.0}).curve[0]
    capped = replace(point.artifact, running_mean=22.0, waiting_max=60, kv_usage_max=0.03)
    result = check_reached([replace(point, artifact=capped)], BOUNDS.min_reached)
    assert result.status == "fail"
    assert result.measured == "M=82: 22 running, 60 waiting, KV 3% used"
    assert "something else caps" in result.reason
    limited = check_reached([replace(point, artifact=capped)], BOUNDS.min_reached, limit=22)
    assert "at most 22 requests together" in limited.reason
    unseen = replace(capped, waiting_max=None, waiting_mean=41.0)
    assert "41 waiting" in check_reached([replace(point, artifact=unseen)], BOUNDS.min_reached).measured
    assert check_reached([point], BOUNDS.min_reached).status == "pass"


def ran(m: int, ours: float, theirs: float) -> CurvePoint:
    point = sample_verdict({m: 1.0}).curve[0]
    return replace(
        point,
        artifact=replace(point.artifact, running_mean=ours),
        baseline=replace(point.baseline, running_mean=theirs),
    )


def test_an_artifact_need_not_run_more_requests_than_the_baseline_could():
    """900 tokens in and 64 out: the first answers end before the last prompts are read."""
    sound = check_reached([ran(1, 1.0, 1.0), ran(32, 22.5, 22.5)], BOUNDS.min_reached)
    assert sound.status == "pass" and "the baseline ran 22.5 of M=32 as well" in sound.reason
    slow = check_reached([ran(32, 16.0, 22.5)], BOUNDS.min_reached)
    assert slow.status == "fail" and "M=32: 16 running" in slow.reason and "ran 22.5" in slow.reason
    assert check_reached([ran(32, 22.5, 31.0)], BOUNDS.min_reached).status == "fail", "the control"
    assert check_reached([ran(32, 30.0, 40.0)], BOUNDS.min_reached).status == "pass", "M is all that counts"
    capped = check_reached([ran(32, 22.5, 22.5)], BOUNDS.min_reached, limit=23)
    assert capped.status == "fail" and "at most 23 requests together" in capped.reason


def test_a_workload_whose_m_not_even_the_baseline_reaches_decides_nothing():
    result = check_reached([ran(1, 1.0, 1.0), ran(32, 15.0, 15.0)], BOUNDS.min_reached)
    assert result.status == "inconclusive"
    assert "the baseline ran 15 of M=32" in result.reason and "--output-len" in result.reason
    assert check_reached([ran(32, 5.0, 15.0)], BOUNDS.min_reached).status == "fail"


@pytest.mark.parametrize("server_counts", [True, False])
def test_queued_requests_do_not_count_as_running_whether_or_not_the_server_counts(server_counts):
    result = load_result(16, 1000.0, running=4)
    result = result if server_counts else replace(result, steps_by_running=None)
    assert decoding_together(result) == pytest.approx(4, rel=0.05)


def throughput_of(ratios: dict[int, float]) -> tuple[str, str]:
    result = check_throughput(sample_verdict(ratios).curve, 0.93, {}, 15)
    return result.status, result.measured


def test_one_slow_m_fails_all_and_is_the_one_shown():
    assert throughput_of({1: 1.2, 8: 1.0})[0] == "pass"
    status, measured = throughput_of({1: 1.2, 8: 0.8})
    assert status == "fail"
    assert "M=8" in measured


def test_drawn_ms_are_told_apart_in_the_words():
    load = WorkloadSettings((1, 8), seed=3, draws_between=True)
    first = load.ms_between[0]

    def check(ratios: dict[int, float]):
        return check_throughput(sample_verdict(ratios, workload=load).curve, 0.93, {}, 15)

    sound = check({1: 1.2, 8: 1.0})
    drawn = ", ".join(map(str, load.ms_between))
    assert sound.status == "pass" and f"M={drawn} were drawn between the given Ms" in sound.reason
    assert f"at most 1 of {RUNS_TO_MISS} runs" in sound.reason and "by estimate at drawn Ms" in sound.bound
    slow = check({1: 1.2, first: 0.6, first + 1: 1.2, 8: 1.0})
    assert slow.status == "fail" and f"at M={first} (drawn): " in slow.reason
    assert slow.measured.startswith("lowest 0.600 [") and f"at M={first} (drawn)" in slow.measured
    assert "drawn" not in check_throughput(sample_verdict({1: 1.2, 8: 1.0}).curve, 0.93, {}, 15).reason


def test_a_drawn_m_at_which_tokens_take_twice_as_long_passes_as_rarely_as_is_said():
    """It passes with an estimate at the floor whose 95% interval spans `WIDEST`, or with a wider one that is
    above 1: how rare are these errors?"""
    prompts = 0.3
    ratio = 1 / (prompts + 2 * (1 - prompts))
    at_floor = math.log(Bounds().throughput_floor / ratio)
    half, wider_half = math.log(WIDEST) / 2, math.log(WIDEST_IF_FASTER) / 2
    errors = {half: at_floor, wider_half: wider_half + math.log(1 / ratio)}
    for test in (SequentialTest(Bounds().throughput_floor, 10), SequentialTest(0.93, 10).of_turns):
        for width, error in errors.items():
            missed = 0.0
            for blocks in test.looks:
                freedom = blocks - 2 * (blocks // VALUES_PER_TRIM) - 1
                errors_of_the_mean = error / width * student_t_quantile(SHOWN_ERROR, freedom)
                missed += _student_t_tail(errors_of_the_mean, freedom)
            assert missed <= 1 / RUNS_TO_MISS


def test_an_undecided_m_is_never_a_pass():
    level = measured_m(8, 0.93, blocks=3)
    test = SequentialTest(0.93, 1, max_blocks=3)
    point = curve_point(level, decide(level.log_ratios(lambda result: result.output_throughput), test))
    result = check_throughput([point], 0.93, {}, 3)
    assert result.status == "inconclusive"
    assert "--max-blocks" in result.reason


@pytest.mark.parametrize(
    ("max_blocks", "in_turns", "words"),
    [
        (LEAST_FOR_GROUPS - 1, False, f"what would decide is --max-blocks {LEAST_FOR_GROUPS}"),
        (LEAST_FOR_GROUPS, False, "what would decide are longer repeats (--output-len, --waves)"),
        (96, True, "what would decide is a machine"),
    ],
)
def test_a_wide_correlation_says_what_would_decide(max_blocks: int, in_turns: bool, words: str):
    point = replace(sample_verdict({8: 1.0}).curve[0], status="inconclusive", correlation=0.8)
    result = check_throughput([point], 0.93, {}, max_blocks, in_turns=in_turns)
    assert "correlated, up to 0.80" in result.reason and words in result.reason
    alone = check_throughput([replace(point, correlation=0.3)], 0.93, {}, max_blocks, in_turns=in_turns)
    assert "would decide" not in alone.reason, "the control"


@pytest.mark.parametrize(("groups", "more_help"), [(4, True), (16, False)])
def test_an_undecided_m_in_turns_is_told_in_groups_and_with_what_can_help(groups: int, more_help: bool):
    level = MeasuredM(8)
    for group in range(groups):
        level.blocks += measured_m(8, 0.8 if group % 2 else 1.1, GROUP).blocks
        for block in level.blocks[-GROUP:]:
            block.restarts = group + 1
    load = WorkloadSettings((8,), max_blocks=groups * GROUP)
    checks = judge(sample_evidence({8: 1.0}, measured=(level,)), load, BOUNDS).checks
    [result] = [check for check in checks if check.name == "throughput"]
    assert result.status == "inconclusive"
    assert f"{groups} groups of {GROUP} blocks" in result.reason and "--devices" in result.reason
    assert ("--max-blocks" in result.reason) == more_help


def test_no_curve_is_not_a_pass():
    assert check_throughput([], 0.93, {}, 15).status == "inconclusive"
    assert check_reached([], 0.75).status == "inconclusive"
    assert check_latency([], BOUNDS).status == "inconclusive"
    assert check_failures([]).status == "inconclusive"
    capacity = check_kv_capacity([], WorkloadSettings(), 1000)
    assert capacity.status == "inconclusive" and capacity.reason == "nothing was measured under load"


def test_requests_that_wait_fail_the_latency_check():
    assert check_latency([measured_m(8, 1.0)], BOUNDS).status == "pass"
    late = check_latency([measured_m(8, 1.0, ttft=0.4)], BOUNDS)
    assert late.status == "fail"
    assert "TTFT" in late.reason


def test_tokens_that_come_slowly_fail_the_latency_check():
    assert "TPOT" in check_latency([measured_m(8, 0.4)], BOUNDS).reason


def test_a_slow_tpot_is_put_down_to_what_the_other_ms_and_requests_show():
    growing = check_latency([measured_m(1, 1.0), measured_m(8, 0.4)], BOUNDS).reason
    assert "longer as the batch grows (M=1: 1.00×)" in growing
    alone = check_latency([measured_m(1, 0.11), measured_m(8, 0.11)], BOUNDS).reason
    assert "from M=1 on (9.2" in alone and "as the batch grows" not in alone
    for unmeasured in ([], [MeasuredM(1)]):
        first = check_latency([*unmeasured, measured_m(8, 0.11)], BOUNDS).reason
        assert "every decode step takes longer at M=8 (9.2" in first and "batch grows" not in first
        assert "not known whether the batch size is the cause" in first
    few = measured_m(8, 1.0)
    for block in few.blocks:
        block.artifact = [
            replace(repeat, tpots=(*repeat.tpots[:7], repeat.tpots[7] * 9)) for repeat in block.artifact
        ]
    reason = check_latency([few], BOUNDS).reason
    assert "the median request's is 1.00×, so a few are slow" in reason


def test_milliseconds_of_time_to_first_token_are_not_held_against_anybody():
    assert check_latency([measured_m(1, 1.0, ttft=0.025)], BOUNDS).status == "pass"


def test_a_failed_request_fails_and_the_baselines_leaves_it_open():
    assert check_failures([measured_m(2, 1.0)]).status == "pass"
    for side, status in (("artifact", "fail"), ("baseline", "inconclusive")):
        level = measured_m(2, 1.0)
        results = getattr(level.blocks[0], side)
        results[0] = replace(results[0], errors=("HTTP 500: oops",))
        result = check_failures([level])
        assert result.status == status
        assert "oops" in result.reason


def test_quality_fails_on_any_one_figure_and_on_what_is_not_finite():
    assert check_quality(SAME, BOUNDS).status == "pass"
    for change in (
        {"mean_kl": 0.2},
        {"nats_per_token": 1.7},
        {"top1_agreement": 0.5},
        {"mean_kl": float("nan"), "nats_per_token": float("nan")},
    ):
        assert check_quality(replace(SAME, **change), BOUNDS).status == "fail"


def test_loading_another_model_fails():
    shapes = {"up": (768, 256), "down": (256, 768)}
    loaded = ModelFigures(shapes, 8192, {"up": "tiles"})
    assert check_loads(loaded, ModelFigures(shapes, 8192)).status == "pass"
    assert "down" in check_loads(loaded, ModelFigures({**shapes, "down": (256, 512)}, 8192)).reason
    assert (
        "missing from the artifact"
        in check_loads(loaded, ModelFigures({**shapes, "extra": (1, 1)}, 8192)).reason
    )
    assert check_loads(loaded, ModelFigures(shapes, 4096)).status == "fail"


def test_serving_other_layouts_than_were_loaded_fails_on_either_side():
    packed = {"tiles 768x256": 4}
    loaded, plain = ModelFigures({}, 8192, packed=packed), ModelFigures({}, 8192, packed={})
    assert check_loads(loaded, plain, packed, {}).status == "pass"
    assert check_loads(loaded, plain, None, None).status == "pass", "an engine that does not say"
    elsewhere = replace(loaded, packed=None)
    assert check_loads(elsewhere, plain, {"rows 768x256": 4}, {}).status == "pass", "not loaded here"
    result = check_loads(loaded, plain, {"rows 768x256": 4}, {})
    assert result.status == "fail" and "4 in rows 768x256" in result.reason and "4 in tiles" in result.reason
    assert check_loads(loaded, plain, {}, {}).status == "fail"
    assert "baseline's server" in check_loads(loaded, plain, packed, {"rows 768x256": 4}).reason


def texts(*continuations: tuple[int, ...]) -> list[Continuation]:
    return [Continuation((1, 2), tokens, "text " * len(tokens)) for tokens in continuations]


def test_canary_text_must_be_likely_varied_and_there():
    def score(prompt, tokens):
        return 5.0 if 99 in tokens else 0.5

    def check(artifact, baseline):
        return check_canary(scored(artifact, score), scored(baseline, score), BOUNDS)

    good = texts((1, 2, 3, 4), (5, 6, 7, 8))
    assert check(good, good).status == "pass"
    assert "not what the baseline" in check(texts((99, 98, 97, 96)), good).reason
    assert "repeats itself" in check(texts((0, 0, 0, 0)), good).reason
    assert check(texts(()), good).status == "fail"
    assert check(good, texts(())).status == "inconclusive"


def test_preemptions_break_the_promised_capacity_and_silence_leaves_it_open():
    curve = sample_verdict({1: 1.0, 8: 1.0}).curve
    load = WorkloadSettings((1, 8))
    assert check_kv_capacity(curve, load, 2048).status == "pass"
    preempted = replace(curve[1], artifact=replace(curve[1].artifact, preemptions=3))
    assert "3 preemptions at M=8" in check_kv_capacity([curve[0], preempted], load, 2048).reason
    silent = replace(curve[1], artifact=replace(curve[1].artifact, preemptions=None))
    unknown = check_kv_capacity([silent], load, None)
    assert unknown.status == "inconclusive" and "do not report preemptions" in unknown.reason


def test_states_are_said_beside_tokens_or_alone():
    curve, load = sample_verdict({8: 1.0}).curve, WorkloadSettings((8,))

    def check(page_bytes: int, states: dict[str, int]):
        return check_kv_capacity(curve, load, 2048, 8, 0.75, RequestMemory(16, page_bytes, 0, states))

    assert check(512, {}) == check_kv_capacity(curve, load, 2048, 8, 0.75)
    hybrid, recurrent = check(512, {"mamba2 float32": 10**6}), check(0, {"mamba1 float32": 10**6})
    assert hybrid.measured.startswith("holds 2048 tokens and the states of 8 requests, 1.00 MB each, ")
    assert recurrent.measured.startswith("holds the states of 8 requests, 1.00 MB each, ")
    assert hybrid.figures["state_bytes"] == 10**6 and hybrid.status == "pass"


def test_a_cache_that_has_room_while_requests_wait_breaks_its_promise():
    point, load = sample_verdict({8: 1.0}).curve[0], WorkloadSettings((8,))
    short = {"running_mean": 2.0, "waiting_max": 6.0, "waiting_mean": 3.0, "kv_usage_max": 0.25}

    def check(capacity: int = 2048, limit: int | None = 8, **changes: float):
        seen = replace(point, artifact=replace(point.artifact, **{**short, **changes}))
        return check_kv_capacity([seen], load, capacity, limit, share=0.75)

    assert check().status == "fail"
    assert (
        "at M=8 the KV cache has room for 16 such requests, yet 2 ran and 6 waited with 25%" in check().reason
    )
    assert check(running_mean=7.0).status == "pass"
    assert check(limit=4).status == "pass", "it says itself that it runs four"
    assert check(capacity=512).status == "pass", "it says itself that it holds four"
    assert check(kv_usage_max=0.95).status == "pass", "it is full"
    assert check(waiting_max=0.0, waiting_mean=0.0).status == "pass", "they never came that far"
    alike = replace(point, baseline=replace(point.baseline, running_mean=2.5))
    few = replace(alike, artifact=replace(alike.artifact, **short))
    assert check_kv_capacity([few], load, 2048, 8, share=0.75).status == "pass", "nor did the baseline's"


def compiled(*samples: str) -> dict[str, float]:
    lines = ['scalegate:compilations_total{kind="",kernel="",key=""} 0.0', *samples]
    return parse_metrics("\n".join(lines))


def test_only_what_was_compiled_between_the_looks_counts_and_silence_decides_nothing():
    earlier = compiled('scalegate:compilations_total{kind="triton compilation",kernel="old",key="i32"} 2.0')
    assert check_compilations(compilations(compiled()), compilations(compiled())).status == "pass"
    assert check_compilations(compilations(earlier), compilations(earlier)).status == "pass"
    later = {**earlier, 'scalegate:compilations_total{kind="t",kernel="new",key="{\\"n\\": 16}"}': 1.0}
    found = check_compilations(compilations(earlier), compilations(later))
    assert (found.status, found.figures) == ("fail", {"compilations": 1})
    assert 't of new for {"n": 16} (1×)' in found.reason and "old" not in found.reason
    foreign = check_compilations(compilations({}), compilations({}))
    assert (foreign.status, foreign.measured) == ("unknown", "not known")
    assert overall_status([foreign, check_failures([measured_m(2, 1.0)])]) == "pass"
    assert overall_status([foreign]) == "inconclusive"


def test_a_load_beyond_the_cache_is_refused_before_it_is_sent():
    require_capacity("the server", 128 * 32, WorkloadSettings((32,)))
    with pytest.raises(UserError, match="M=33"):
        require_capacity("the server", 128 * 32, WorkloadSettings((33,)))
