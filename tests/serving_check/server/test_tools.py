"""Calls of tools in what models write: found in whole and streamed answers, however these are cut."""

import json

import pytest
from scalegate.serving_check.server.errors import ApiError
from scalegate.serving_check.server.schema import ChatCompletionRequest
from scalegate.serving_check.server.served_model import ServedModel, encode_chat
from scalegate.serving_check.server.tool_calls import (
    FORMATS,
    HERMES,
    LLAMA,
    MISTRAL,
    ToolParser,
    calls_in,
    format_of,
)

USER = [{"role": "user", "content": "x"}]
CALL = '{"name": "add", "arguments": {"a": 1}}'
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
ADD = [("add", {"a": 1})]
CASES = [
    (HERMES, f"Well.<tool_call>\n{CALL}\n</tool_call>", "Well.", ADD),
    (HERMES, f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>!", "\n!", ADD * 2),
    (HERMES, "a <tool_cat> b <tool_ca", "a <tool_cat> b <tool_ca", []),
    (HERMES, "<tool_call>no json</tool_call> end", "<tool_call>no json</tool_call> end", []),
    (HERMES, f"<tool_call>{CALL}", "", ADD),
    (HERMES, '<tool_call>{"name": 5}</tool_call>', '<tool_call>{"name": 5}</tool_call>', []),
    (MISTRAL, f"Hm [TOOL_CALLS][{CALL}, {CALL}]", "Hm ", ADD * 2),
    (MISTRAL, '[TOOL_CALLS]add{"a": 1}', "", ADD),
    (MISTRAL, '[TOOL_CALLS]add[ARGS]{"a": 1}', "", ADD),
    (MISTRAL, "[TOOL_CALLS] then nothing", "[TOOL_CALLS] then nothing", []),
    (LLAMA, '{"name": "add", "parameters": {"a": 1}}', "", ADD),
    (LLAMA, '<|python_tag|>{"name": "add", "parameters": {"a": 1}}', "", ADD),
    (LLAMA, '{"a": "map"}', '{"a": "map"}', []),
    (LLAMA, "A word { and more", "A word { and more", []),
]


def read(form, pieces, is_call=False, most=None):
    parser = ToolParser(form, is_call, most)
    text, calls = "", []
    for piece in pieces:
        shown, new = parser.feed(piece)
        text, calls = text + shown, calls + new
    shown, new = parser.flush()
    calls += new
    assert parser.found == len(calls)
    return text + shown, [(call.name, json.loads(call.arguments)) for call in calls]


@pytest.mark.parametrize(("form", "answer", "text", "calls"), CASES)
def test_calls_are_found_wherever_an_answer_is_cut(form, answer, text, calls):
    expected = text, calls
    assert read(form, [answer]) == expected
    assert read(form, list(answer)) == expected
    for cut in range(1, len(answer)):
        assert read(form, [answer[:cut], answer[cut:]]) == expected


def test_text_is_not_held_back_longer_than_it_could_be_a_call():
    parser = ToolParser(HERMES, False, None)
    assert parser.feed("one <too")[0] == "one "
    assert parser.feed("th>")[0] == "<tooth>"


def test_an_answer_that_has_to_be_calls_is_a_list_of_them():
    assert read(HERMES, [f"[{CALL}, ", f"{CALL}]"], is_call=True) == ("", ADD * 2)
    assert read(HERMES, [f"[{CALL}, {CALL}]"], is_call=True, most=1) == ("", ADD)
    assert read(HERMES, ['[{"name": "ad'], is_call=True) == ('[{"name": "ad', [])


@pytest.mark.parametrize("body", ["", "[]", "5", "null", "[[", CALL + " and", "{" * 100_000, '{"name": ""}'])
def test_what_is_no_call_is_none(body):
    assert calls_in(body) == []


@pytest.mark.parametrize("form", FORMATS)
def test_the_form_is_read_from_the_template(form):
    assert format_of("{% if tools %}" + form.template_marks[0]) is form
    assert format_of(form.template_marks[0]) is None


def test_no_form_without_tools_in_the_template():
    assert format_of(None) is None and format_of("{{ messages }} {{ tools }}") is None


class TemplateOnly:
    """As much of a tokenizer as rendering takes."""

    chat_template = "{% if tools %}<tool_call>{% endif %}"

    def get_vocab(self):
        return {"a": 0}

    def apply_chat_template(self, messages, **options):
        return json.dumps([messages, options["tools"]])

    def encode(self, text, add_special_tokens):
        return [ord(letter) for letter in text]


def test_the_template_gets_the_tools_and_earlier_calls_with_their_arguments_as_objects():
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    answered = {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None}
    messages = [*USER, answered, {"role": "tool", "content": "2", "tool_call_id": "1"}]
    request = ChatCompletionRequest(messages=messages, tools=[TOOL])
    seen, tools = json.loads("".join(map(chr, encode_chat(TemplateOnly(), request, 10_000))))
    assert tools == [TOOL]
    assert seen[1]["content"] == "" and seen[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert seen[2]["tool_call_id"] == "1"
    none = ChatCompletionRequest(messages=USER, tools=[TOOL], tool_choice="none")
    assert json.loads("".join(map(chr, encode_chat(TemplateOnly(), none, 10_000))))[1] is None


def test_tools_are_refused_where_the_template_takes_none():
    tokenizer = TemplateOnly()
    request = ChatCompletionRequest(messages=USER, tools=[TOOL])
    ServedModel("m", tokenizer, 100, 8192).check_chat(request)
    tokenizer.chat_template = "{{ messages }}"
    with pytest.raises(ApiError, match=r"takes no tools .*hermes, mistral, llama3_json"):
        ServedModel("m", tokenizer, 100, 8192).check_chat(request)


def test_a_chosen_tool_is_the_only_one_that_the_schema_has():
    other = {"type": "function", "function": {"name": "other"}}
    chosen = {"type": "function", "function": {"name": "add"}}
    auto = ChatCompletionRequest(messages=USER, tools=[TOOL, other])
    required = ChatCompletionRequest(messages=USER, tools=[TOOL, other], tool_choice="required")
    named = ChatCompletionRequest(messages=USER, tools=[TOOL, other], tool_choice=chosen)
    names = [
        [call["properties"]["name"]["const"] for call in request.answer_schema["items"]["anyOf"]]
        for request in (required, named)
    ]
    assert auto.answer_schema is None and names == [["add", "other"], ["add"]]
    for wrong in ({"tool_choice": "required"}, {"tools": [other], "tool_choice": chosen}):
        with pytest.raises(ValueError, match="tool_choice is"):
            ChatCompletionRequest(messages=USER, **wrong)
