"""`/openapi.json` tells what the server answers: statuses, streams, nulls, fields that ask for nothing."""

import httpx
import pytest


@pytest.fixture(scope="module")
def document(server):
    return httpx.get(f"{server.base_url}/openapi.json").json()


def test_every_refusal_and_the_stream_are_declared(document):
    for path in ("/v1/completions", "/v1/chat/completions"):
        responses = document["paths"][path]["post"]["responses"]
        assert set(responses["200"]["content"]) == {"application/json", "text/event-stream"}
        assert {"400", "401", "404", "408", "413", "429", "500", "503"} <= set(responses)
        assert "422" not in responses
    assert set(document["paths"]["/metrics"]["get"]["responses"]["200"]["content"]) == {"text/plain"}
    assert document["components"]["schemas"]["Error"]["required"] == ["error"]
    assert "security" not in document


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/v1/completions", {"prompt": []}),
        ("POST", "/v1/completions", {"prompt": "x", "model": "other"}),
        ("POST", "/v1/chat/completions", None),
        ("POST", "/tokenize", {}),
        ("POST", "/detokenize", {"tokens": [-1]}),
        ("GET", "/v1/models/other", None),
        ("DELETE", "/v1/completions", None),
    ],
)
def test_what_is_refused_is_declared_and_has_the_declared_form(server, document, method, path, body):
    answer = httpx.request(method, server.base_url + path, json=body)
    declared = document["paths"][path.replace("/other", "/{name}")]
    operation = declared.get(method.lower()) or declared["post"]
    assert str(answer.status_code) in operation["responses"] and answer.status_code >= 400
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    if answer.status_code == 405:
        assert "POST" in answer.headers["allow"]


def test_nulls_and_neutral_fields_are_part_of_the_schema(document):
    properties = document["components"]["schemas"]["ChatCompletionRequest"]["properties"]
    assert {"type": "null"} in properties["stream"]["anyOf"] and {"type": "null"} in properties["n"]["anyOf"]
    assert "anyOf" not in properties["messages"]
    assert properties["best_of"]["enum"] == [1, None] and "metadata" in properties
