"""Answers that have to be JSON are, of the schema, whoever is served beside them; so are required calls."""

import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from scalegate.base.errors import UserError
from scalegate.serving_check.engine.grammar import Grammars
from scalegate.serving_check.engine.request import SamplingParams

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "size": {"enum": ["small", "large"]},
        "counts": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
    },
    "required": ["name", "size", "counts"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
USER = [{"role": "user", "content": "def f"}]
TOOLS_TEMPLATE = (
    "{% for message in messages %}# {{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if tools %}<tool_call> {{ tools | tojson }}{% endif %}"
)


@pytest.fixture(scope="module")
def client(server):
    with httpx.Client(base_url=server.base_url, timeout=60) as client:
        yield client


def require_thing(text: str) -> None:
    value = json.loads(text)
    assert set(value) == {"name", "size", "counts"}
    assert isinstance(value["name"], str) and len(value["name"]) <= 8
    assert value["size"] in ("small", "large")
    assert len(value["counts"]) <= 3 and all(type(n) is int and 0 <= n <= 99 for n in value["counts"])


def test_answers_satisfy_their_schema_and_neighbours_are_as_they_are_alone(client):
    plain = {"prompt": "def f", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    alone = client.post("/v1/completions", json=plain).json()["choices"][0]["text"]

    def ask(index: int) -> None:
        if index % 4 == 0:
            assert client.post("/v1/completions", json=plain).json()["choices"][0]["text"] == alone
            return
        body = {"temperature": 1.5, "seed": index, "response_format": FORMAT, "max_tokens": 120}
        chat = index % 4 == 1
        path, asked = ("chat/completions", {"messages": USER}) if chat else ("completions", {"prompt": "x"})
        [choice] = client.post(f"/v1/{path}", json={**asked, **body}).json()["choices"]
        assert choice["finish_reason"] == "stop"
        require_thing(choice["message"]["content"] if chat else choice["text"])

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(ask, range(32)))


def test_without_a_schema_the_same_prompt_gives_no_such_thing(client):
    body = {"prompt": "x", "temperature": 1.5, "seed": 1, "max_tokens": 120}
    with pytest.raises((ValueError, AssertionError)):
        require_thing(client.post("/v1/completions", json=body).json()["choices"][0]["text"])


def test_a_json_object_begins_as_one(client):
    body = {"prompt": "x", "temperature": 1, "max_tokens": 30, "response_format": {"type": "json_object"}}
    assert client.post("/v1/completions", json=body).json()["choices"][0]["text"].startswith("{")


@pytest.mark.parametrize(
    ("response_format", "message"),
    [
        ({"type": "json_schema", "json_schema": {"schema": {"type": "nope"}}}, "cannot be used"),
        ({"type": "json_schema", "json_schema": {"schema": {"$ref": "http://x/y"}}}, "cannot be used"),
        ({"type": "json_schema", "json_schema": {"schema": {"enum": ["x" * 70_000]}}}, "65536 are taken"),
        ({"type": "json_schema"}, "json_schema"),
        ({"type": "xml"}, "type"),
    ],
)
def test_what_is_no_usable_schema_is_refused(client, response_format, message):
    answer = client.post("/v1/completions", json={"prompt": "x", "response_format": response_format})
    assert answer.status_code == 400 and message in answer.json()["error"]["message"], answer.text
    assert client.get("/health").status_code == 200


def test_calls_that_are_required_come_whole_and_streamed(example_checkpoint, serve_command, tmp_path):
    from scalegate.serving_check.adapters import SubprocessEndpoint

    template = tmp_path / "template.jinja"
    template.write_text(TOOLS_TEMPLATE)
    options = ["--chat-template", str(template), "--max-model-len", "512", "--kv-cache-tokens", "2048"]
    parameters = {"type": "object", "properties": {"size": {"enum": ["small", "large"]}}}
    parameters |= {"required": ["size"], "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "fetch", "parameters": parameters}}
    body = {"messages": USER, "tools": [tool], "temperature": 1, "seed": 5, "max_tokens": 60}
    body |= {"tool_choice": {"type": "function", "function": {"name": "fetch"}}}
    with (
        SubprocessEndpoint(
            serve_command(example_checkpoint, *options), str(example_checkpoint), log=tmp_path / "log.txt"
        ) as endpoint,
        httpx.Client(base_url=endpoint.base_url, timeout=60) as client,
    ):
        [choice] = client.post("/v1/chat/completions", json=body).json()["choices"]
        assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
        [call] = choice["message"]["tool_calls"]
        assert call["type"] == "function" and call["function"]["name"] == "fetch"
        assert json.loads(call["function"]["arguments"])["size"] in ("small", "large")
        text = client.post("/v1/chat/completions", json={**body, "stream": True}).text
        events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        deltas = [event["choices"][0]["delta"] for event in events]
        [streamed] = [call for delta in deltas for call in delta.get("tool_calls", [])]
        assert streamed["index"] == 0 and streamed["function"] == call["function"]
        assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"
        counted = client.post("/tokenize", json={"messages": USER, "tools": [tool]}).json()["count"]
        assert counted > client.post("/tokenize", json={"messages": USER}).json()["count"]


def test_a_grammar_without_the_library_or_a_tokenizer_is_refused_by_the_engine(monkeypatch):
    with pytest.raises(UserError, match="needs a tokenizer"):
        Grammars(None, 100).matcher("{}")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install llguidance"):
        Grammars(None, 100).matcher("{}")
    with pytest.raises(UserError, match="grammar must be a text"):
        SamplingParams(grammar="{}", min_tokens=2)
