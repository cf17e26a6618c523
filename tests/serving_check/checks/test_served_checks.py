"""The checks of what was served and when, passing and failing, on raw figures made of plain numbers."""

from array import array
from dataclasses import replace

import pytest
from scalegate.base.errors import UserError
from scalegate.serving_check.adapters import Endpoint
from scalegate.serving_check.adapters.one_server import refuse_one_address, refuse_shared_counter
from scalegate.serving_check.checks.latency import check_latency
from scalegate.serving_check.checks.loads import check_loads
from scalegate.serving_check.checks.plausible import check_plausible
from scalegate.serving_check.checks.received import check_received
from scalegate.serving_check.checks.served_text import check_served_text, may_be_baselines, tokens_off
from scalegate.serving_check.checks.stalls import check_stalls, m_in_doubt
from scalegate.serving_check.checks.streamed import check_streamed
from scalegate.serving_check.evidence.answer_figures import (
    AnswerFigures,
    TokenText,
    answer_figures,
    spread_evenly,
)
from scalegate.serving_check.evidence.curve import curve_of
from scalegate.serving_check.evidence.evidence import ModelFigures, RepeatedPrompts, TextScore
from scalegate.serving_check.evidence.gaps import Gap, LongestGaps, longest_gaps
from scalegate.serving_check.evidence.measurement import MeasuredM, Repeat
from scalegate.serving_check.gate.repeats import Repeats
from scalegate.serving_check.settings import Bounds, WorkloadSettings
from scalegate.serving_check.workload import RequestRecord, WorkloadSpec
from scalegate.serving_check.workload.answers import Answer, read_answer

from ..gate_samples import ARTIFACT, BASELINE, load_result, measured_m

BOUNDS = Bounds()
WORDS = TokenText(lambda text: [ord(character) for character in text], lambda ids: "".join(map(chr, ids)))


def changed(level: MeasuredM, **changes: object) -> MeasuredM:
    """`one`, with these fields of every repeat of the artifact; a function of a repeat gives each its own."""
    for block in level.blocks:
        block.artifact[:] = [
            replace(
                repeat,
                **{name: value(repeat) if callable(value) else value for name, value in changes.items()},
            )
            for repeat in block.artifact
        ]
    return level


# Answers.


def answered(*answers: tuple[str, int], told: bool = True) -> AnswerFigures:
    """What is counted of these texts, each with the number of tokens that `usage` claims."""
    records = tuple(
        RequestRecord(
            0.0, 0.1, (), 1.0, claimed, 4, answer=Answer(text, array("L", map(ord, text)) if told else None)
        )
        for text, claimed in answers
    )
    return answer_figures(replace(load_result(2, 100.0), requests=records), WORDS)


@pytest.mark.parametrize("told", [True, False])
def test_half_an_answer_is_not_all_that_is_claimed(told: bool):
    sound = answered(("abcdefgh", 8), ("bcdefghi", 8), told=told)
    assert check_received([changed(measured_m(2, 1.0), answers=sound)]).status == "pass"
    half = answered(("abcd", 8), ("bcdefghi", 8), told=told)
    result = check_received([changed(measured_m(2, 1.0), answers=half)])
    assert result.status == "fail" and "at M=2 12 of 24 streams end early" in result.reason


def test_what_the_server_did_not_count_was_not_computed():
    counted = changed(measured_m(8, 1.0), answers=lambda repeat: replace(repeat.answers, counted_tokens=256))
    result = check_received([counted])
    assert result.status == "fail" and "counter rose by 3072 tokens, usage claims 6144" in result.reason
    silent = changed(measured_m(8, 1.0), answers=lambda repeat: replace(repeat.answers, counted_tokens=None))
    assert check_received([silent]).status == "pass"
    assert check_received([]).status == "inconclusive"


def test_answers_are_read_from_their_events_and_from_nothing_else():
    events = [
        b'data: {"choices":[{"text":"a \\"b","token_ids":[1,2]}]}',
        b'data: {"choices":[]}',
        b": a comment",
        b'data: {"choices":[{"text":"c","token_ids":[3]}]}',
    ]
    assert read_answer(events) == Answer('a "bc', array("L", [1, 2, 3]))
    assert read_answer([b'data: {"choices":[{"text":"c"}]}']) == Answer("c", None)


def test_likeness_within_and_between_answers_is_counted():
    figures = answered(("abcdefgh", 8), ("abcdefgh", 8), ("aaaaaaaa", 8))
    assert (figures.duplicates, figures.one_token) == (1, 1)
    assert figures.variety == pytest.approx((1 + 1 + 1 / 8) / 3)
    changed_text = replace(load_result(1, 100.0), requests=())
    assert answer_figures(changed_text, WORDS).answers == 0


def test_texts_are_taken_from_all_over():
    assert spread_evenly(range(100), 4) == [0, 25, 50, 75]
    assert spread_evenly(range(3), 4) == [0, 1, 2]


# Served text.


def served(scores: list[TextScore], **answers: object) -> tuple[str, str]:
    level = measured_m(8, 1.0)
    if answers:
        level = changed(level, answers=lambda repeat: replace(repeat.answers, **answers))
    result = check_served_text(scores, [level], BOUNDS)
    return result.status, result.reason


OWN = [TextScore(8, 64, 0, 2, "text")] * 12 + [TextScore(1, 64, 1, 2, "text")]


def test_text_that_its_own_logits_give_passes_and_the_baselines_does_not():
    assert served(OWN)[0] == "pass"
    status, reason = served([TextScore(8, 64, 2, 0, "text")] * 12)
    assert status == "fail" and "serves the baseline" in reason
    same = [TextScore(8, 64, 1, 1, "text")] * 12
    assert served(same)[0] == "pass", "the baseline against itself, in noise"
    assert served([])[0] == "inconclusive"


def test_one_wrong_text_among_many_is_named_with_its_m():
    status, reason = served([*OWN, TextScore(8, 64, 40, 41, "garbage")])
    assert status == "fail" and "1 of 13 at M=8" in reason and "'garbage'" in reason
    assert "only that load is wrong" in reason
    status, reason = served([TextScore(m, 64, 40, 41, "garbage") for m in (1, 8)])
    assert status == "fail" and "another model is served" in reason


def test_gaps_count_from_the_tolerance_on_and_no_number_counts_too():
    assert tokens_off([0.0, 0.2, 0.3, float("nan")]) == 2


def test_the_baselines_logits_are_needed_only_where_they_may_change_the_verdict():
    text = replace(OWN[0], tokens=6400)
    for off in range(30):
        found = {theirs: served([replace(text, off=off, baseline_off=theirs)])[0] for theirs in range(40)}
        assert may_be_baselines(off) == (set(found.values()) == {"pass", "fail"})
        assert served([replace(text, off=off, baseline_off=None)])[0] == found[0], "the stricter one"


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ({"not_its_tokens": 1}, "does not match their token ids"),
        ({"duplicates": 4}, "repeat another answer"),
        ({"one_token": 4}, "are one token repeated"),
        ({"distinct_share": 1.0}, "repeat themselves"),
    ],
)
def test_answers_that_are_changed_or_all_alike_fail(answers: dict, words: str):
    status, reason = served(OWN, **answers)
    assert status == "fail" and words in reason


@pytest.mark.parametrize(("degenerate", "status"), [(1, "pass"), (4, "pass"), (5, "fail")])
def test_an_answer_of_one_token_among_few_is_chance_and_many_are_not(degenerate: int, status: str):
    """A small model's greedy answer to one of eleven prompts was one token: that is what it says."""
    left = iter([1] * degenerate)
    level = changed(
        measured_m(1, 1.0, blocks=11), answers=lambda repeat: replace(repeat.answers, one_token=next(left, 0))
    )
    result = check_served_text([TextScore(1, 64, 0, 2, "text")], [level], BOUNDS)
    assert result.status == status, result.reason


@pytest.mark.parametrize(("blocks", "status"), [(7, "pass"), (8, "fail")])
def test_few_answers_may_be_alike_by_chance(blocks: int, status: str):
    level = changed(
        measured_m(1, 1.0, blocks=blocks), answers=lambda repeat: replace(repeat.answers, distinct_share=0.1)
    )
    assert check_served_text([TextScore(1, 64, 0, 2, "text")], [level], BOUNDS).status == status


# Time.


def with_gap(seconds: float, every: int = 1, side: str = "artifact") -> MeasuredM:
    level = measured_m(8, 1.0)
    for index, block in enumerate(level.blocks):
        for repeats in (block.artifact, block.baseline):
            repeats[:] = [
                replace(repeat, began=float(index), gaps=LongestGaps(Gap(0.0, 0.02), Gap(0.0, 0.01)))
                for repeat in repeats
            ]
        if index % every == 0:
            results = getattr(block, side)
            results[0] = replace(results[0], gaps=LongestGaps(Gap(0.0, 0.02), Gap(0.25, seconds)))
    return level


def test_pauses_are_counted_placed_in_time_and_compared_with_the_machines():
    result = check_stalls([with_gap(0.4, every=2)], BOUNDS)
    assert result.status == "fail", result
    assert "0.40 s at 0.2 s (M=8), 0.40 s at 2.2 s (M=8), 0.40 s at 4.2 s (M=8)" in result.reason
    assert check_stalls([with_gap(0.05)], BOUNDS).status == "pass"
    assert check_stalls([with_gap(0.4, side="baseline")], BOUNDS).status == "pass"
    both = with_gap(0.4)
    for block in both.blocks:
        block.baseline[0] = replace(block.baseline[0], gaps=block.artifact[0].gaps)
    assert check_stalls([both], BOUNDS).status == "pass"
    assert check_stalls([], BOUNDS).status == "inconclusive"


def test_while_prompts_are_computed_a_gap_may_be_as_much_longer_as_the_bounds_let_first_tokens_be():
    slow = measured_m(8, 1.0)
    for block in slow.blocks:
        for repeats, filling in ((block.artifact, 0.45), (block.baseline, 0.1)):
            gaps = LongestGaps(Gap(0.0, filling), Gap(0.5, 0.01))
            repeats[:] = [replace(repeat, gaps=gaps) for repeat in repeats]
    assert check_stalls([slow], BOUNDS).status == "fail"
    declared = replace(BOUNDS, max_ttft_ratio=6.0)
    assert check_stalls([slow], declared).status == "pass"
    assert check_stalls([with_gap(0.4, every=2)], declared).status == "fail", "none is computed then"


def test_a_few_stalls_of_the_artifact_alone_are_in_doubt_until_both_are_served_at_once():
    few = with_gap(0.4, every=4)
    assert check_stalls([few], BOUNDS).status == "inconclusive"
    assert m_in_doubt([few], BOUNDS) == 8
    assert m_in_doubt([few, MeasuredM(32)], BOUNDS) == 8, "measuring that ended early"
    assert m_in_doubt([with_gap(0.05)], BOUNDS) is None
    assert m_in_doubt([MeasuredM(1)], BOUNDS) is None
    assert m_in_doubt([with_gap(0.4)], BOUNDS) is None, "that is enough already"

    result = check_stalls([few], BOUNDS, with_gap(0.4, every=2))
    assert result.status == "fail" and "the artifact alone stalled 6 times" in result.reason
    assert check_stalls([few], BOUNDS, with_gap(0.05)).status == "pass", "not once more"
    assert check_stalls([few], BOUNDS, with_gap(0.4, every=6)).status == "inconclusive", "twice is not enough"
    machines = with_gap(0.4, every=2)
    for block in machines.blocks:
        block.baseline[0] = replace(block.baseline[0], gaps=block.artifact[0].gaps)
    assert check_stalls([few], BOUNDS, machines).status == "pass", "what stops both is the machine"


def test_the_longest_gap_is_of_all_streams_together():
    result = replace(
        load_result(2, 100.0),
        requests=(
            RequestRecord(0.0, 0.1, (0.1, 0.7, 0.1), 1.0, 4, 4),
            RequestRecord(0.0, 0.15, (0.25, 0.1, 0.45), 1.0, 4, 4),
        ),
    )
    found = longest_gaps(result)
    assert (found.filling.at, found.filling.seconds) == (0.0, 0.1)
    assert (found.decoding.at, found.decoding.seconds) == (0.5, 0.4), (
        "one stream's 0.7 s are broken by another"
    )


def test_one_burst_at_the_end_is_not_a_stream_and_is_not_blamed_on_the_queue():
    burst = changed(measured_m(8, 1.0, ttft=5.0), streamed_share=0.01, tpots=(0.0001,) * 8)
    curve = curve_of([burst], WorkloadSettings((8,)), BOUNDS)
    result = check_streamed(curve)
    assert result.status == "fail" and "one burst at the end, the first chunk after 99%" in result.reason
    reason = check_latency([burst], BOUNDS).reason
    assert "nothing is streamed" in reason and "queue" not in reason
    sound = curve_of([measured_m(8, 1.0)], WorkloadSettings((8,)), BOUNDS)
    assert check_streamed(sound).status == "pass"


def test_slow_reading_of_prompts_is_not_taken_for_a_burst():
    slow = changed(
        measured_m(8, 1.0),
        streamed_share=0.01,
        ttfts=lambda repeat: tuple(100 * ttft for ttft in repeat.ttfts),
    )
    assert check_streamed(curve_of([slow], WorkloadSettings((8,)), BOUNDS)).status == "pass"
    result = check_latency([slow], BOUNDS)
    assert result.status == "fail" and "behind long prefills" in result.reason


def test_a_tail_and_a_slow_step_have_causes_of_their_own():
    tail = changed(measured_m(8, 1.0), tpots=lambda repeat: (*repeat.tpots[1:], repeat.tpots[0] * 4))
    assert "a few are slow" in check_latency([tail], BOUNDS).reason
    alone = check_latency([measured_m(1, 0.1), measured_m(8, 0.1)], BOUNDS).reason
    assert "every decode step takes longer, from M=1 on" in alone and "batch grows" not in alone
    grows = check_latency([measured_m(1, 1.0), measured_m(8, 0.4)], BOUNDS).reason
    assert "decode steps take longer as the batch grows" in grows


def test_a_step_that_takes_far_longer_in_every_repeat_fails_the_latency_check():
    jumps = changed(measured_m(8, 1.0), itl_p999=0.2)
    for block in jumps.blocks:
        block.baseline[:] = [replace(repeat, itl_p999=0.01) for repeat in block.baseline]
    result = check_latency([jumps], BOUNDS)
    assert result.status == "fail" and "99.9th percentile" in result.reason


# Too good.


def plausible(ratio: float, repeated: RepeatedPrompts | None = None, bytes_ratio: int = 2) -> tuple[str, str]:
    curve = curve_of([measured_m(8, ratio)], WorkloadSettings((8,)), BOUNDS)
    ours, theirs = ModelFigures({}, 8, weight_bytes=100), ModelFigures({}, 8, weight_bytes=100 * bytes_ratio)
    result = check_plausible(curve, ours, theirs, repeated, BOUNDS)
    return result.status, result.reason


def test_what_is_faster_than_its_bytes_allow_is_implausible():
    assert plausible(5.0)[0] == "pass"
    status, reason = plausible(147.0)
    assert status == "fail" and "× the baseline's tokens" in reason
    assert plausible(5.0, bytes_ratio=1)[0] == "fail"


def test_a_repeated_prompt_costs_what_a_new_one_costs():
    assert plausible(1.0, RepeatedPrompts(8, 0.010, 0.009))[0] == "pass"
    status, reason = plausible(1.0, RepeatedPrompts(8, 0.010, 0.0001))
    assert status == "fail" and "answered from a cache" in reason


# Servers.


def test_a_server_elsewhere_packs_as_it_likes_but_the_same_weights():
    loaded = ModelFigures({}, 8, packed_weights=2 * 768 * 256)
    plain = ModelFigures({}, 8, packed_weights=0)
    assert check_loads(loaded, plain, {"tiles 1536x256": 1}, {}).status == "pass"
    assert check_loads(loaded, plain, None, None).status == "pass", "an engine that does not say"
    result = check_loads(loaded, plain, {}, {})
    assert result.status == "fail" and "it serves another checkpoint" in result.reason


def test_one_server_under_two_names_is_refused():
    refuse_one_address(Endpoint("http://127.0.0.1:8000", "a"), Endpoint("http://127.0.0.1:8001", "b"))
    with pytest.raises(UserError, match="are the same server"):
        refuse_one_address(Endpoint("http://127.0.0.1:8000", "a"), Endpoint("http://localhost:8000/", "b"))


def test_a_counter_that_moves_with_the_others_requests_gives_one_server_away():
    said = {"vllm:generation_tokens_total": 100.0}
    refuse_shared_counter(ARTIFACT, said, said, 512)
    refuse_shared_counter(ARTIFACT, {}, {}, 512)
    with pytest.raises(UserError, match="one server is behind both"):
        refuse_shared_counter(ARTIFACT, said, {"vllm:generation_tokens_total": 612.0}, 512)


def test_a_hang_is_called_by_a_deadline_from_the_baselines_speed():
    deadlines = []

    def run(endpoint: Endpoint, spec: WorkloadSpec):
        deadlines.append((endpoint.model, spec.m, spec.request_timeout))
        return load_result(spec.m, 64.0 * spec.m)  # a second for each request

    repeats = Repeats(run, ARTIFACT, BASELINE, None)
    for endpoint, m, length in ((ARTIFACT, 1, 64), (BASELINE, 1, 64), (ARTIFACT, 1, 64), (ARTIFACT, 8, 128)):
        assert isinstance(repeats(endpoint, WorkloadSpec(m, m, 8, length)), Repeat)
    assert deadlines == [
        ("artifact", 1, 600.0), ("baseline", 1, 600.0), ("artifact", 1, 25.0), ("artifact", 8, 325.0),
    ]  # fmt: skip
