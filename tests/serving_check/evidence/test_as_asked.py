"""Answers that are not what their requests asked for, each named by what is wrong with it."""

from array import array
from dataclasses import replace

import pytest
from scalegate.serving_check.evidence.answer_figures import TokenText
from scalegate.serving_check.evidence.as_asked import not_as_asked, seeds_kept
from scalegate.serving_check.workload.answers import Alternatives, Answer, Envelope
from scalegate.serving_check.workload.open_loop import OpenLoopResult
from scalegate.serving_check.workload.planned_request import PlannedRequest
from scalegate.serving_check.workload.spec import RequestRecord

END = 0
LETTERS = TokenText(
    lambda text: list(map(ord, text)), lambda ids: "".join(chr(id) for id in ids if id != END)
)


def told(text, *, more=(), **fields):
    return Answer(text, array("L", [*map(ord, text), *more]), **fields)


def alternatives(chosen, logprob):
    return Alternatives(chosen, {chosen: logprob, **dict.fromkeys("wxyz", -9.0)})


SOUND = {
    "greedy": (PlannedRequest(0.0, "greedy", (1, 2), 4), 4, told("abcd", finish_reason="length")),
    "chat": (
        PlannedRequest(0.0, "chat", (1, 2), 4, messages=(("user", "x"),)),
        4,
        told("abcd", finish_reason="length", prompt_token_ids=(1, 2)),
    ),
    "stop": (
        PlannedRequest(0.0, "stop", (1, 2), 8, stop="cd"),
        4,
        Answer("ab", array("L", map(ord, "abcd")), "stop"),
    ),
    "unstopped": (
        PlannedRequest(0.0, "stop", (1, 2), 4, stop="xy"),
        4,
        told("abcd", finish_reason="length"),
    ),
    "end": (
        PlannedRequest(0.0, "end", (1, 2), 12, end_token=END, min_tokens=4),
        5,
        told("abcd", more=[END], finish_reason="stop"),
    ),
    "logprobs": (
        PlannedRequest(0.0, "logprobs", (1, 2), 4),
        4,
        told(
            "abcd",
            finish_reason="length",
            logprobs=(-1.0, -2.0, -0.5, -0.1),
            alternatives=tuple(map(alternatives, "abcd", (-1.0, -2.0, -0.5, -0.1))),
        ),
    ),
}
UNTOLD = {
    "stop": Answer("ab", None, "stop"),
    "end": Answer("abcd", None, "stop"),
    "greedy": Answer("abcd", None, "length"),
}


def found(planned, output_tokens, answer, prompt_tokens=2, error=None, total_tokens=None):
    record = RequestRecord(0.0, 0.1, (), 1.0, output_tokens, prompt_tokens, error, planned.prompt, answer)
    record = replace(record, total_tokens=total_tokens)
    return not_as_asked(OpenLoopResult(0.0, 1.0, (planned,), (record,), None, None, None, "model"), LETTERS)


@pytest.mark.parametrize("kind", SOUND)
def test_a_sound_answer_is_as_asked(kind):
    assert found(*SOUND[kind]) == ()


@pytest.mark.parametrize("kind", UNTOLD)
def test_without_token_ids_only_the_text_is_judged(kind):
    planned, output_tokens, _ = SOUND[kind]
    assert found(planned, output_tokens, UNTOLD[kind]) == ()


def test_a_server_that_does_not_count_the_end_is_as_asked():
    planned, _, answer = SOUND["end"]
    assert found(planned, 4, replace(answer, token_ids=array("L", map(ord, "abcd")))) == ()
    assert found(planned, 4, UNTOLD["end"]) == ()


@pytest.mark.parametrize(
    ("kind", "fields", "words"),
    [
        ("greedy", {"text": "abcx"}, "its text is not that of its tokens"),
        ("greedy", {"token_ids": array("L", map(ord, "abc"))}, "usage says 4 tokens, the stream has 3"),
        ("greedy", {"finish_reason": "stop"}, "finish_reason is 'stop'"),
        ("chat", {"prompt_token_ids": (1, 3)}, "its prompt is not the chat template's"),
        ("stop", {"text": "abcd"}, "its stop string is in the text"),
        ("stop", {"token_ids": array("L", map(ord, "abce"))}, "a stop string that its tokens do not have"),
        ("stop", {"finish_reason": "length"}, "it went on after its stop string"),
        ("stop", {"text": "a"}, "its text is not that of its tokens"),
        ("end", {"finish_reason": "length"}, "finish_reason is 'length'"),
        (
            "end",
            {"token_ids": array("L", [97, 98, END]), "text": "ab"},
            "2 tokens before its end, 4 were asked",
        ),
        (
            "end",
            {"token_ids": array("L", [97, 98, 99, 100, 101]), "text": "abcde"},
            "5 tokens before its end",
        ),
        ("logprobs", {"alternatives": None}, "5 alternatives are told at 0 of 4 tokens"),
        (
            "logprobs",
            {"alternatives": tuple(map(alternatives, "abce", (-1.1, -2.1, -0.6, -0.3)))},
            "4 of 4 tokens are not among their alternatives, or with another log-probability",
        ),
        ("logprobs", {"logprobs": None}, "it has no log-probabilities"),
        ("logprobs", {"logprobs": (-1.0, -2.0)}, "log-probabilities of 2 of 4 tokens"),
        ("logprobs", {"logprobs": (-1.0, None, -1.0, -1.0)}, "log-probabilities of 3 of 4 tokens"),
    ],
)
def test_what_is_wrong_is_named(kind, fields, words):
    planned, output_tokens, answer = SOUND[kind]
    (problem,) = found(planned, output_tokens, replace(answer, **fields))
    assert problem.startswith(f"{planned.kind}: ") and words in problem


def test_pieces_of_characters_are_alternatives_though_their_texts_are_equal():
    planned, output_tokens, answer = SOUND["logprobs"]
    pieces = Alternatives("\N{REPLACEMENT CHARACTER}", {"\N{REPLACEMENT CHARACTER}": -3.0, "x": -4.0})
    assert found(planned, output_tokens, replace(answer, alternatives=(pieces,) * 4)) == ()


def test_prompts_of_another_length_and_short_answers_are_named():
    planned, _, answer = SOUND["greedy"]
    (problem,) = found(planned, 4, answer, prompt_tokens=1)
    assert "usage says 1 prompt tokens, the one sent has 2" in problem
    planned, _, answer = SOUND["unstopped"]
    short = Answer("ab", array("L", map(ord, "ab")), "length")
    (problem,) = found(planned, 2, short)
    assert "2 of 4 tokens, and finish_reason is 'length'" in problem
    planned, _, _ = SOUND["end"]
    (problem,) = found(planned, 3, UNTOLD["end"])
    assert "3 tokens before its end, 4 were asked for" in problem


def test_another_name_of_the_model_and_another_sum_of_tokens_are_named_whatever_was_asked():
    planned, _, answer = SOUND["greedy"]
    assert found(planned, 4, replace(answer, model="model"), total_tokens=6) == ()
    assert found(planned, 4, replace(answer, model="other"), total_tokens=4) == (
        "name of the model: 'model' was asked, and the answer says it is of 'other'",
        "usage: it says 4 tokens in all, with 2 of the prompt and 4 of the answer",
    )


def of_choices(*choices, output_tokens=9):
    """What is wrong with several answers to one request, all of which should have three tokens."""
    planned = PlannedRequest(0.0, "choices", (1, 2), 3, temperature=1.0, seed=1, choices=3)
    record = RequestRecord(0.0, 0.1, (), 1.0, output_tokens, 2, answer=choices[0], other_choices=choices[1:])
    return not_as_asked(OpenLoopResult(0.0, 1.0, (planned,), (record,), None, None, None), LETTERS)


def test_each_of_several_choices_has_its_tokens_and_its_end():
    first, second, third = (told(text, finish_reason="length") for text in ("abc", "abd", "xyz"))
    assert of_choices(first, second, third) == ()
    untold = Answer("", None)
    assert of_choices(first, untold, untold) == ("choices: 1 of 3 choices have an end",)
    (problem,) = of_choices(first, second, told("xy", finish_reason="length"))
    assert "its choices have 3, 3, 2 tokens, 3 were asked for of each" in problem
    (problem,) = of_choices(first, second, replace(third, text="abc"))
    assert "the text of a choice is not that of its tokens" in problem


def test_failed_and_aborted_requests_are_left_out():
    planned, _, answer = SOUND["greedy"]
    wrong = replace(answer, text="abcx")
    assert found(planned, 4, wrong) and found(planned, 4, wrong, error="HTTP 500") == ()
    aborted = PlannedRequest(0.0, "aborted", (1, 2), 8, abort_after=2)
    assert found(aborted, 0, wrong, prompt_tokens=0) == ()


def test_text_that_the_server_has_parsed_is_not_held_to_its_tokens():
    planned, output_tokens, answer = SOUND["chat"]
    assert found(planned, output_tokens, replace(answer, text="cd"))
    assert found(planned, output_tokens, replace(answer, text="cd", is_parsed=True)) == ()


@pytest.mark.parametrize(
    ("text", "sound"), [("ab\N{REPLACEMENT CHARACTER}d", True), ("abd", True), ("xbd", False)]
)
def test_text_is_compared_up_to_a_broken_character(text, sound):
    """Some streams lose the character after it; a text that is wrong before it is wrong."""
    planned, _, answer = SOUND["greedy"]
    broken = replace(answer, token_ids=array("L", map(ord, "ab\N{REPLACEMENT CHARACTER}d")), text=text)
    assert (found(planned, 4, broken) == ()) == sound


def test_text_may_lack_a_character_that_was_not_finished():
    planned, _, answer = SOUND["greedy"]
    broken = replace(answer, token_ids=array("L", map(ord, "abc\N{REPLACEMENT CHARACTER}")))
    assert found(planned, 4, replace(broken, text="abc")) == ()
    assert found(planned, 4, replace(broken, text="ab"))


def test_answers_with_one_seed_are_compared_by_how_they_begin():
    asked = PlannedRequest(0.0, "sampled", (1, 2), 6, temperature=1.0, seed=7)
    other = replace(asked, seed=8)
    sent = [(asked, "abcdef"), (other, "xbcdef"), (asked, "abcdxx"), (asked, "abxdef"), (other, "xbcd")]
    records = [
        RequestRecord(0.0, 0.1, (), 1.0, 6, 2, None, planned.prompt, told(text)) for planned, text in sent
    ]
    requests = tuple(planned for planned, _ in sent)
    result = OpenLoopResult(0.0, 1.0, requests, tuple(records), None, None, None)
    assert seeds_kept(result) == (True, False, True)
    untold = [replace(record, answer=Answer(record.answer.text, None, "length")) for record in records]
    assert seeds_kept(replace(result, records=tuple(untold))) == (True, False, True)


ENVELOPE = Envelope(("a",), ("text_completion",), (1000,), (0,), (None,))
CHAT = replace(ENVELOPE, objects=("chat.completion.chunk",), roles=("assistant",))


def told_beside(*envelopes, kind="greedy", starts=(0.0, 3.0, 6.0), took=1.0):
    """What is wrong with what answers say beside their text; the clock of the starts began at 1000."""
    planned, _, answer = SOUND[kind]
    records = tuple(
        RequestRecord(start, 0.1, (), took, 4, 2, None, planned.prompt, answer, envelope=envelope)
        for start, envelope in zip(starts, envelopes, strict=False)
    )
    result = OpenLoopResult(0.0, 9.0, (planned,) * len(records), records, None, None, None, began_at=1000.0)
    return not_as_asked(result, LETTERS)


@pytest.mark.parametrize(
    ("kind", "envelope", "words"),
    [
        (
            "greedy",
            replace(ENVELOPE, ids=("a", "b", "c", "d")),
            "id: one answer has 'a', 'b', 'c' and 1 more",
        ),
        ("greedy", replace(ENVELOPE, ids=(None,)), "id: one answer has None"),
        ("greedy", replace(ENVELOPE, objects=("chunk",)), "object: an answer is 'chunk', it should be"),
        ("greedy", replace(ENVELOPE, created=(1000, 1001)), "created: one answer has 1000, 1001"),
        (
            "greedy",
            replace(ENVELOPE, indexes=(0, 1)),
            "choices: 1 were asked for, and there are those of index",
        ),
        ("chat", replace(CHAT, roles=(None,)), "role: a chat's answer begins with None"),
        ("chat", replace(CHAT, objects=("chat.completion",)), "object: an answer is 'chat.completion', it"),
        ("greedy", replace(ENVELOPE, created=(1000_000,)), "created: the times are +999001 s from"),
    ],
)
def test_what_is_wrong_beside_the_text_is_named(kind, envelope, words):
    sound = CHAT if kind == "chat" else ENVELOPE
    assert told_beside(sound, kind=kind) == ()
    (problem,) = told_beside(envelope, kind=kind)
    assert problem.startswith(words)


def test_ids_of_different_answers_are_different():
    other = replace(ENVELOPE, ids=("b",), created=(1003,))
    assert told_beside(ENVELOPE, other) == ()
    assert told_beside(ENVELOPE, replace(other, ids=("a",))) == ("id: 2 answers have the same",)


@pytest.mark.parametrize("clock", [0, 3600])
def test_times_of_answers_follow_when_they_were_sent_by_any_clock(clock):
    sent = [
        replace(ENVELOPE, ids=(id,), created=(clock + second,))
        for id, second in zip("abc", (1000, 1003, 1007), strict=True)
    ]
    assert told_beside(*sent) == ()
    still = [replace(envelope, created=(clock + 1000,)) for envelope in sent]
    (problem,) = told_beside(*still)
    assert "do not follow when requests were sent" in problem
    milliseconds = [replace(envelope, created=(1000 * envelope.created[0],)) for envelope in sent]
    (problem,) = told_beside(*milliseconds)
    assert "from this machine's clock" in problem
