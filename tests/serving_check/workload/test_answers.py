"""What streams said, read from the events of our server and of vLLM."""

import json

from scalegate.serving_check.workload.answers import Envelope, read_answer, read_envelope


def events(*chunks):
    return [b"data: " + json.dumps(chunk).encode() for chunk in chunks]


def test_a_chat_is_put_together_from_its_deltas():
    answer = read_answer(
        events(
            {"choices": [{"delta": {"role": "assistant", "content": ""}}], "prompt_token_ids": [7, 8]},
            {"choices": [{"delta": {"content": "a b"}, "token_ids": [1, 2], "finish_reason": None}]},
            {"choices": [{"delta": {"content": " c"}, "token_ids": [3], "finish_reason": "length"}]},
        )
    )
    assert answer.text == "a b c" and list(answer.token_ids) == [1, 2, 3]
    assert answer.finish_reason == "length"
    assert answer.prompt_token_ids == (7, 8) and not answer.is_parsed
    reasoning = read_answer(events({"choices": [{"delta": {"reasoning": "so"}, "token_ids": [1]}]}))
    assert reasoning.is_parsed and reasoning.text == ""


def test_log_probabilities_are_those_of_the_chosen_tokens():
    def chunk(*logprobs):
        tops = [{"x": -0.1} for _ in logprobs]
        return {"choices": [{"text": "x", "logprobs": {"token_logprobs": logprobs, "top_logprobs": tops}}]}

    assert read_answer(events(chunk(-0.5), chunk(-1.5, None))).logprobs == (-0.5, -1.5, None)
    assert read_answer(events({"choices": [{"text": "x", "logprobs": None}]})).logprobs is None


def test_alternatives_are_told_by_text_beside_the_text_that_was_chosen():
    told = {
        "tokens": ["b", "c"],
        "token_logprobs": [-0.5, -2.0],
        "top_logprobs": [{"b": -0.5, "a": -1.0}, None],
    }
    first, second = read_answer(events({"choices": [{"text": "bc", "logprobs": told}]})).alternatives
    assert (first.chosen, first.logprobs) == ("b", {"b": -0.5, "a": -1.0})
    assert (second.chosen, second.logprobs) == ("c", {})


def test_each_choice_is_read_by_its_index():
    chunks = events(
        {"choices": [{"index": 1, "text": "x", "token_ids": [1]}]},
        {
            "choices": [
                {"index": 0, "text": "a", "token_ids": [2]},
                {"index": 1, "text": "y", "token_ids": [3]},
            ]
        },
        {"choices": [{"index": 0, "text": "b", "token_ids": [4], "finish_reason": "length"}]},
    )
    first, second, third = (read_answer(chunks, index) for index in range(3))
    assert (first.text, list(first.token_ids), first.finish_reason) == ("ab", [2, 4], "length")
    assert (second.text, list(second.token_ids), second.finish_reason) == ("xy", [1, 3], None)
    assert (third.text, third.token_ids) == ("", None)


def test_the_name_of_the_model_is_the_last_that_was_told():
    choice = {"choices": [{"text": "x"}]}
    assert read_answer(events({**choice, "model": "a"}, {**choice, "model": "b"})).model == "b"
    assert read_answer(events(choice)).model is None


def test_a_completion_may_tell_its_prompt_in_its_choice():
    answer = read_answer(events({"choices": [{"text": "x", "prompt_token_ids": [1], "token_ids": [2]}]}))
    assert answer.prompt_token_ids == (1,) and list(answer.token_ids) == [2]


def test_an_envelope_has_all_different_values_of_its_events():
    def chunk(at, **delta):
        choice = {"index": at % 2, "delta": delta}
        return {"id": f"c{at % 2}", "object": "chunk", "created": 7 + at, "choices": [choice]}

    usage = {"id": "c9", "object": "chunk", "created": 7, "choices": [], "usage": {}}
    told = read_envelope(
        events(chunk(0, role="assistant"), chunk(1, content="x"), chunk(0, content="y"), usage)
    )
    assert told == Envelope(("c0", "c1", "c9"), ("chunk",), (7, 8), (0, 1), ("assistant", None))


def test_what_has_the_wrong_type_or_is_missing_in_an_envelope_is_none():
    choice = {"index": "0", "text": "x"}
    told = read_envelope([*events({"id": 3, "created": 1.5, "choices": [choice]}), b"data: [DONE]"])
    assert told == Envelope((None,), (None,), (None,), (None,), (None,))
