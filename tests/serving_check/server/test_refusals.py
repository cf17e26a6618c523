"""What a real server refuses, and how: OpenAI's shape, the status that fits, and a message that helps."""

import httpx
import pytest
from scalegate.base.errors import UserError
from scalegate.serving_check.server.errors import ApiError
from scalegate.serving_check.server.model_description import SamplingDefaults
from scalegate.serving_check.server.neutral_fields import NEUTRAL as NEUTRAL_FIELDS
from scalegate.serving_check.server.neutral_fields import WITHOUT_EFFECT
from scalegate.serving_check.server.schema import ChatCompletionRequest, CompletionRequest
from scalegate.serving_check.server.served_model import ServedModel
from transformers import AutoTokenizer


@pytest.fixture(scope="module")
def client(server):
    with httpx.Client(base_url=server.base_url, timeout=60) as client:
        yield client


def refusal(response, status):
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


USER = [{"role": "user", "content": "x"}]
TEXT_PART = {"type": "text", "text": "hi"}


@pytest.mark.parametrize(
    ("change", "param", "message"),
    [
        ({"best_of": 2}, "best_of", "would change the answer"),
        ({"best_of": True}, "best_of", "would change the answer"),
        ({"use_beam_search": True}, "use_beam_search", "not supported by this server"),
        ({"suffix": "end"}, "suffix", "not supported by this server"),
        ({"bad_words": ["x"]}, "bad_words", "not supported by this server"),
        ({"min_tokens": 17}, "min_tokens", "at most 16 tokens are drawn"),
        ({"frequency_penalty": 2.5}, "frequency_penalty", "less than or equal to 2"),
        ({"presence_penalty": -2.5}, "presence_penalty", "greater than or equal to -2"),
        ({"repetition_penalty": 0}, "repetition_penalty", "greater than or equal to 0.01"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "match pattern"),
        ({"logit_bias": {"1": 101}}, "logit_bias", "less than or equal to 100"),
        ({"logit_bias": {"9000": 1}}, "logit_bias", "token id 9000"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", "at most 1024 items"),
        ({"max_tokens": -1}, "max_tokens", "greater than or equal to 0"),
        ({"prompt_logprobs": 21}, "prompt_logprobs", "less than or equal to 20"),
        ({"prompt_logprobs": 1, "stream": True}, None, "set stream to false"),
        ({"prompt": [1] * 513, "max_tokens": 0}, "prompt", "shorten the prompt"),
        ({"max_tokens": "12"}, "max_tokens", "valid integer"),
        ({"temperature": -0.1}, "temperature", "greater than or equal to 0"),
        ({"top_p": 0}, "top_p", "greater than or equal to 0.000001"),
        ({"top_p": 1e-320}, "top_p", "greater than or equal to 0.000001"),
        ({"top_k": -2}, "top_k", "greater than or equal to -1"),
        ({"top_k": 2**63}, "top_k", "less than or equal to 2147483647"),
        ({"seed": 2**63}, "seed", "less than"),
        ({"temperature": 1e308}, "temperature", "less than or equal to 100"),
        ({"max_tokens": 2**63}, "max_tokens", "less than or equal to"),
        ({"stop": ["x"] * 33}, "stop", "at most 32 items"),
        ({"stop": "x" * 513}, "stop", "at most 512 characters"),
        ({"stop_token_ids": [1] * 1025}, "stop_token_ids", "at most 1024 items"),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"logprobs": 21}, "logprobs", "less than or equal to 20"),
        ({"stop": ["a", ""]}, "stop", "at least 1 character"),
        ({"stream_options": {"include_usage": True}}, None, "set stream to true"),
        ({"stream": True, "stream_options": {"usage": True}}, "stream_options", "unknown parameter"),
        ({"prompt": []}, "prompt", "at least 1 item"),
        ({"prompt": ""}, "prompt", "at least 1 character"),
        ({"prompt": [[1], []]}, "prompt", "at least 1 item"),
        ({"prompt": [-1]}, "prompt", ""),
        ({"prompt": 5}, "prompt", ""),
        ({"prompt": [9000]}, "prompt", "token id 9000"),
        ({"stop_token_ids": [9000]}, "stop_token_ids", "token id 9000"),
        ({"prompt": [1] * 500, "max_tokens": 13}, "max_tokens", "ask for at most 12"),
        ({"prompt": [1] * 512}, "prompt", "shorten the prompt"),
    ],
)
def test_a_wrong_completion_request(client, change, param, message):
    error = refusal(client.post("/v1/completions", json={"prompt": "x", **change}), 400)
    assert message in error["message"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"messages": []}, "at least 1 item"),
        ({"messages": [{"content": "x"}]}, "'messages.0.role' is missing"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "no tools here"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "this server reads text only; leave out the part of type 'image_url'",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": [TEXT_PART, {"type": "input_audio", "input_audio": {}}]}
                ]
            },
            "leave out the part of type 'input_audio'",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}, "valid string"),
        ({"top_logprobs": 2}, "set logprobs to true"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "differ"),
        ({"messages": [{"role": "user", "content": "x " * 600}]}, "shorten the prompt"),
    ],
)
def test_a_wrong_chat_request(client, change, message):
    error = refusal(client.post("/v1/chat/completions", json={"messages": USER, **change}), 400)
    assert message in error["message"]


NEUTRAL = {
    "logit_bias": {},
    "best_of": 1,
    "repetition_penalty": 1.0,
    "length_penalty": 1,
    "frequency_penalty": 0,
    "presence_penalty": 0.0,
    "use_beam_search": False,
    "spaces_between_special_tokens": True,
    "stop": [],
    "stop_token_ids": [],
    "suffix": "",
    "bad_words": [],
    "user": "someone",
    "metadata": {"a": "b"},
    "service_tier": "auto",
    "seed": 0,
}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_neutral_values_and_nulls_of_known_fields_change_nothing(client, path):
    asked = {"prompt": "def f"} if path == "/v1/completions" else {"messages": USER}
    body = {**asked, "max_tokens": 6, "temperature": 0, "ignore_eos": True, "seed": 0}
    plain = client.post(path, json=body)
    fields = (CompletionRequest if "prompt" in asked else ChatCompletionRequest).model_fields
    nulls = dict.fromkeys({*fields, *NEUTRAL_FIELDS, *WITHOUT_EFFECT} - body.keys())
    for extra in (NEUTRAL, nulls):
        answer = client.post(path, json={**extra, **body})
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"] == plain.json()["choices"]
        assert "warning" not in answer.headers


def test_unknown_fields_are_named_in_a_header_also_of_a_stream(client):
    body = {"prompt": "x", "max_tokens": 1, "temprature": 0, "frob": {"a": [1]}, "bad\r\nname": 1}
    for stream in (False, True):
        answer = client.post("/v1/completions", json={**body, "stream": stream})
        assert answer.status_code == 200
        assert answer.headers["warning"] == '299 scalegate "unknown parameters ignored: ?, frob, temprature"'


@pytest.mark.parametrize(
    "change", [{"temperature": 1e-320}, {"temperature": 1e-40}, {"top_k": 2**31 - 1}, {"seed": 2**63 - 1}]
)
def test_settings_at_their_bounds_leave_the_engine_serving(client, change):
    body = {"prompt": "def ", "max_tokens": 4, "n": 2, "return_token_ids": True}
    greedy = client.post("/v1/completions", json={**body, "temperature": 0}).json()["choices"]
    answer = client.post("/v1/completions", json={**body, **change})
    assert answer.status_code == 200, answer.text
    if "temperature" in change:
        assert [c["token_ids"] for c in answer.json()["choices"]] == [c["token_ids"] for c in greedy]
    assert client.get("/health").status_code == 200


def test_a_missing_prompt_and_a_body_that_is_not_json(client):
    assert "'prompt' is missing" in refusal(client.post("/v1/completions", json={}), 400)["message"]
    headers = {"Content-Type": "application/json"}
    broken = client.post("/v1/completions", content=b'{"prompt": ', headers=headers)
    assert "not valid JSON" in refusal(broken, 400)["message"]


def test_another_model_and_another_path_are_not_found(client):
    error = refusal(client.post("/v1/completions", json={"model": "gpt-4", "prompt": "x"}), 404)
    assert error["code"] == "model_not_found" and "'pycode'" in error["message"]
    refusal(client.get("/v1/nothing"), 404)
    refusal(client.get("/v1/completions"), 405)


def test_a_refused_request_leaves_nothing_running(client):
    client.post("/v1/completions", json={"prompt": [1] * 512})
    text = client.get("/metrics").text
    assert 'vllm:num_requests_running{model_name="pycode"} 0.0' in text


def test_a_model_without_a_chat_template_says_so(example_checkpoint):
    tokenizer = AutoTokenizer.from_pretrained(example_checkpoint)
    model = ServedModel("m", tokenizer, 100, 8192)
    model.check_chat(ChatCompletionRequest(messages=USER))
    tokenizer.chat_template = None
    with pytest.raises(ApiError, match="no chat template"):
        model.check_chat(ChatCompletionRequest(messages=USER))


def test_a_model_without_a_tokenizer_takes_token_ids_only():
    model = ServedModel("m", None, 100, 8192)
    assert model.prompts_of(CompletionRequest(prompt=[1, 2])) == [[1, 2]]
    with pytest.raises(ApiError, match="token ids"):
        model.prompts_of(CompletionRequest(prompt="x"))


@pytest.mark.parametrize(
    "config",
    [
        {"top_k": 2**63},
        {"top_k": "many"},
        {"temperature": 1e999},
        {"temperature": -1},
        {"top_p": 0},
        {"min_p": [1]},
        {"repetition_penalty": 0},
        {"max_new_tokens": 0},
        {"max_new_tokens": True},
    ],
)
def test_a_hostile_generation_config_is_refused_when_it_is_read(config):
    with pytest.raises(UserError, match=r"generation_config.json: .* must be"):
        SamplingDefaults.from_generation_config(config)


def test_the_models_own_sampling_defaults_apply_and_the_request_has_the_last_word():
    config = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "max_new_tokens": 40, "repetition_penalty": 1.1}
    defaults = SamplingDefaults.from_generation_config(config)
    model = ServedModel("m", None, 100, 8192, defaults)
    params = model.sampling_params(CompletionRequest(prompt=[1], top_k=-1, temperature=0), 1)
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0, 0, 0.95, 0.0)
    assert params.repetition_penalty == 1.1
    neutral = CompletionRequest(prompt=[1], repetition_penalty=1)
    assert not model.sampling_params(neutral, 1).adjusts_logits
    chat = ChatCompletionRequest(messages=USER)
    assert model.sampling_params(chat, 1).max_tokens == 40
    assert model.sampling_params(chat, 80).max_tokens == 20
    assert model.sampling_params(chat, 1).temperature == 0.6
    assert ServedModel("m", None, 100, 8192).sampling_params(chat, 1).temperature == 1.0
