"""Which answers are scored, and what each was served beside."""

from array import array
from dataclasses import replace

import pytest
from scalegate.serving_check.evidence.answer_figures import TokenText
from scalegate.serving_check.evidence.served_in_use import (
    GREEDY_ANSWERS,
    SAMPLED_TOKENS,
    answers_to_score,
)
from scalegate.serving_check.workload import RequestRecord
from scalegate.serving_check.workload.answers import Alternatives, Answer
from scalegate.serving_check.workload.open_loop import OpenLoopResult
from scalegate.serving_check.workload.planned_request import PlannedRequest

WORDS = TokenText(lambda text: [ord(character) for character in text], lambda ids: "".join(map(chr, ids)))


def request(
    kind: str = "greedy", prompt: int = 20, prompt_from: int = 0, **changes: object
) -> PlannedRequest:
    tokens = tuple(range(prompt_from, prompt_from + prompt))
    return replace(PlannedRequest(0.0, kind, tokens, 8), **changes)


def record(start: float = 0.0, text: str = "abcdefgh", told: bool = True, **changes: object) -> RequestRecord:
    """The first chunk after 1 s, the others every second."""
    ids = array("L", map(ord, text)) if told else None
    itls = (1.0,) * (len(text) - 1)
    sent = RequestRecord(start, 1.0, itls, float(len(text)), len(text), 20, answer=Answer(text, ids))
    return replace(sent, **changes)


def loop(*pairs: tuple[PlannedRequest, RequestRecord]) -> OpenLoopResult:
    requests, records = zip(*pairs, strict=True)
    return OpenLoopResult(0.0, 1.0, requests, records, None, None, None)


def chosen(*pairs: tuple[PlannedRequest, RequestRecord]):
    return answers_to_score([loop(*pairs)], WORDS)


def test_m_and_company_are_those_that_its_tokens_saw():
    """The first decodes from 1 to 8, the second from 4 to 11; the third was read from 7.5 to 8.5."""
    pairs = [(request(prompt=30 - at), record(start)) for at, start in enumerate((0.0, 3.0, 7.5))]
    first, second, third = chosen(*pairs)
    assert (first.context, second.context) == (38, 37), "the longest come first"
    assert first.m == pytest.approx((3 * 1 + 5 * 2) / 8)
    # At 4 to 8 the first decodes too; from 8.5 on the third.
    assert second.m == pytest.approx((5 * 2 + 3 * 2) / 8)
    assert (first.prompts_beside, second.prompts_beside, third.prompts_beside) == (2, 1, 0)


def test_an_answer_alone_has_an_m_of_one_and_no_company():
    [alone, _] = chosen((request(prompt=30), record()), (request(), record(100.0)))
    assert (alone.m, alone.prompts_beside) == (1.0, 0)


def test_failed_and_aborted_requests_are_not_scored_but_are_company():
    failed = (request(), record(2.0, error="HTTP 500", answer=None, ttft=None, e2el=0.5))
    [answer] = chosen((request(), record()), failed, (request("aborted"), record(3.0)))
    assert answer.prompts_beside == 2


def test_tokens_are_those_told_or_else_the_texts_without_the_last():
    told, encoded = chosen((request(prompt=30), record()), (request(), record(told=False)))
    assert told.tokens == tuple(map(ord, "abcdefgh"))
    assert encoded.tokens == tuple(map(ord, "abcdefg"))


def test_what_was_not_chosen_freely_is_left_out():
    [answer] = chosen((request("end", end_token=7, min_tokens=3), record()))
    assert (answer.tokens, answer.end_token) == (tuple(map(ord, "abc")), 7)


def test_a_text_that_a_reader_took_apart_cannot_be_tokenized_again():
    parsed = Answer("abc", None, is_parsed=True)
    assert chosen((request("chat"), record(answer=parsed))) == ()


def test_an_answer_to_a_text_of_which_the_server_makes_another_prompt_is_not_scored():
    asked = request(prompt=30, text="x")
    same, other = (replace(record(), prompt_tokens=count) for count in (30, 29))
    assert len(chosen((asked, same))) == 1
    assert chosen((asked, other)) == ()
    assert len(chosen((request(prompt=30), other))) == 1


def test_log_probabilities_belong_to_those_that_asked():
    answer = Answer("ab", array("L", [1, 2]), logprobs=(-0.5, -1.5))
    asked, other = chosen(
        (request("logprobs", 30), record(answer=answer)), (request(), record(answer=answer))
    )
    assert (asked.logprobs, other.logprobs) == ((-0.5, -1.5), None)


def sampled(prompt: int = 20, seed: int = 0, **changes: object):
    return request("sampled", prompt, seed=seed, temperature=1.0, **changes)


def test_sampled_answers_are_compared_with_those_of_other_seeds():
    first, equal, other, alone = chosen(
        (sampled(seed=1), record()),
        (sampled(seed=2), record()),
        (sampled(seed=3), record(text="abcdefgz")),
        (sampled(prompt=10, seed=1), record()),
    )
    repeats = [answer.repeats_other_seed for answer in (first, equal, other, alone)]
    assert repeats == [None, True, False, None]


def test_each_choice_is_an_answer_that_is_compared_with_the_ones_before_it():
    choices = tuple(Answer(text, array("L", map(ord, text))) for text in ("abcdefgh", "xbcdefgh"))
    several = request("choices", seed=1, temperature=1.0, choices=3)
    found = chosen((several, record(other_choices=choices)))
    assert [(answer.kind, answer.choice, answer.repeats_other_seed) for answer in found] == [
        ("sampled", 0, None),
        ("sampled", 1, True),
        ("sampled", 2, False),
    ]


def test_alternatives_have_ids_where_the_server_names_tokens_as_the_tokenizer_does():
    """The text of some is of several tokens, or no text."""
    told = (
        Alternatives("a", {"b": -2.0, "a": -0.5}),
        Alternatives("b", {"b": -0.1, "xy": -3.0, "\ufffd": -9.0}),
    )
    answer = Answer("ab", array("L", map(ord, "ab")), alternatives=told)
    [served] = chosen((request("logprobs"), record(answer=answer)))
    assert served.alternatives == (
        ((ord("a"), -0.5), (ord("b"), -2.0)),
        ((ord("b"), -0.1), (None, -3.0), (None, -9.0)),
    )
    elsewhere = replace(answer, alternatives=tuple(replace(position, chosen="?") for position in told))
    [served] = chosen((request("logprobs"), record(answer=elsewhere)))
    assert served.alternatives[0] == ((None, -0.5), (None, -2.0))


def test_alternatives_have_no_ids_where_words_and_their_endings_have_one_text():
    """As SentencePiece decodes single tokens: without the space before them."""
    words = TokenText(
        lambda text: [ord(word[0]) for word in text.split()], lambda ids: " ".join(map(chr, ids))
    )
    told = (Alternatives("a", {"a": -0.5, "b": -2.0}),)
    answer = Answer("a", array("L", [ord("a")]), alternatives=told)
    [served] = answers_to_score([loop((request("logprobs"), record(answer=answer)))], words)
    assert served.alternatives == (((None, -0.5), (None, -2.0)),)


def test_the_same_draw_counts_once_and_retokenized_draws_do_not():
    assert len(chosen((sampled(), record()), (sampled(), record(50.0)))) == 1
    assert chosen((sampled(), record(told=False))) == ()


def many() -> OpenLoopResult:
    """Short plain completions mostly, and a few of everything else."""
    kinds = ["greedy"] * 170 + ["chat"] * 10 + ["stop"] * 10 + ["end"] * 10
    pairs = [(request(kind, 16), record(at * 0.1)) for at, kind in enumerate(kinds)]
    pairs += [(request(prompt=length), record(20.0 * length)) for length in (100, 1000, 5000, 5001, 5002)]
    pairs += [(sampled(20 + at), record(1e6, "x" * 100)) for at in range(60)]
    return loop(*pairs)


def test_prompts_that_begin_like_another_one_are_chosen_first():
    """Of hundreds of answers only some are scored, and what is kept of a prefix may be mixed up."""
    alone = [(request(prompt=30, prompt_from=40 * at), record(100.0 * at)) for at in range(1, 200)]
    shared = [(request(prompt=30), record(100.0 * at)) for at in (300, 301, 302)]
    answers = chosen(*alone, *shared)
    assert len(answers) == GREEDY_ANSWERS
    assert sum(answer.prompt == tuple(range(30)) for answer in answers) == 3


def test_the_choice_is_limited_spread_and_always_the_same():
    scored = answers_to_score([many()], WORDS)
    assert scored == answers_to_score([many()], WORDS)
    greedy = [answer for answer in scored if answer.kind != "sampled"]
    assert len(greedy) == GREEDY_ANSWERS
    assert {5008, 5009, 5010, 1008, 108} <= {answer.context for answer in greedy}
    for kind in ("chat", "stop", "end"):
        assert sum(answer.kind == kind for answer in greedy) >= 5
    assert sum(not answer.prompts_beside for answer in greedy) >= 5
    drawn = sum(len(answer.tokens) for answer in scored if answer.kind == "sampled")
    assert SAMPLED_TOKENS <= drawn < SAMPLED_TOKENS + 100
