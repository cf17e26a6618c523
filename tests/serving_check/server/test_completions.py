"""`/v1/completions` and `/v1/chat/completions` of a real server on the bundled checkpoint, over loopback."""

import json

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPT = "def fibonacci(n):\n"


@pytest.fixture(scope="module")
def client(server):
    with httpx.Client(base_url=server.base_url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def tokenizer(example_checkpoint):
    return AutoTokenizer.from_pretrained(example_checkpoint)


@pytest.fixture(scope="module")
def greedy(example_checkpoint, tokenizer):
    """What transformers' own generate() gives, as token ids, without the prompt."""
    model = AutoModelForCausalLM.from_pretrained(example_checkpoint, dtype=torch.float32)

    def generate(prompt: list[int], length: int) -> list[int]:
        ids = torch.tensor([prompt])
        output = model.generate(ids, max_new_tokens=length, min_new_tokens=length, do_sample=False)
        return output[0, len(prompt) :].tolist()

    return generate


@pytest.fixture(scope="module")
def likelihood(example_checkpoint):
    """Log-probabilities by transformers of all tokens but the first."""
    model = AutoModelForCausalLM.from_pretrained(example_checkpoint, dtype=torch.float32)

    def score(tokens: list[int]) -> list[float]:
        with torch.no_grad():
            logprobs = model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
        return logprobs.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()

    return score


def complete(client, **body):
    response = client.post("/v1/completions", json={"prompt": PROMPT, "temperature": 0, **body})
    assert response.status_code == 200, response.text
    return response.json()


def events(client, path, **body):
    """The parsed events of a stream, after checking that it ends as it should."""
    with client.stream("POST", path, json={"stream": True, **body}) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_greedy_text_is_what_generate_gives(client, tokenizer, greedy):
    prompt = tokenizer.encode(PROMPT)
    expected = greedy(prompt, 24)
    answer = complete(client, max_tokens=24, ignore_eos=True, return_token_ids=True)
    choice = answer["choices"][0]
    assert choice["token_ids"] == expected
    assert choice["prompt_token_ids"] == prompt
    assert choice["text"] == tokenizer.decode(expected, skip_special_tokens=True)
    assert choice["finish_reason"] == "length"
    assert answer["object"] == "text_completion"
    assert answer["usage"] == {
        "prompt_tokens": len(prompt),
        "completion_tokens": 24,
        "total_tokens": len(prompt) + 24,
    }


def test_a_stream_adds_up_to_the_whole_answer(client):
    whole = complete(client, max_tokens=30, ignore_eos=True)
    options = {"include_usage": True}
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 30, "ignore_eos": True}
    chunks = events(client, "/v1/completions", **body, stream_options=options)
    *chunks, last = chunks
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["choices"][0]["text"]
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons[-1] == "length" and set(reasons[:-1]) == {None}
    assert last["choices"] == [] and last["usage"] == whole["usage"]
    assert len(chunks) > 5


def test_usage_comes_only_when_asked_for(client):
    body = {"prompt": PROMPT, "max_tokens": 3}
    assert all("usage" not in chunk for chunk in events(client, "/v1/completions", **body))
    options = {"continuous_usage_stats": True, "include_usage": True}
    chunks = events(client, "/v1/completions", **body, stream_options=options, ignore_eos=True)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == 3


def test_every_shape_of_prompt(client, tokenizer):
    ids = tokenizer.encode(PROMPT)
    text = complete(client, max_tokens=6)["choices"][0]["text"]
    assert complete(client, prompt=ids, max_tokens=6)["choices"][0]["text"] == text
    for prompt in ([PROMPT, "class A"], [ids, tokenizer.encode("class A")]):
        answer = complete(client, prompt=prompt, max_tokens=6)
        assert [choice["index"] for choice in answer["choices"]] == [0, 1]
        assert answer["choices"][0]["text"] == text
        assert answer["usage"]["prompt_tokens"] == len(ids) + len(tokenizer.encode("class A"))


def test_n_gives_different_samples_and_the_seed_the_same_ones_again(client):
    body = {"n": 4, "seed": 11, "temperature": 1.0, "max_tokens": 12, "ignore_eos": True}
    first, second = complete(client, **body), complete(client, **body)
    texts = [choice["text"] for choice in first["choices"]]
    assert texts == [choice["text"] for choice in second["choices"]]
    assert len(set(texts)) > 1
    assert [choice["index"] for choice in first["choices"]] == [0, 1, 2, 3]
    assert first["usage"]["completion_tokens"] == 48
    other = complete(client, **{**body, "seed": 12345})
    assert [choice["text"] for choice in other["choices"]] != texts


def test_top_k_of_one_is_greedy(client):
    greedy_text = complete(client, max_tokens=12)["choices"][0]["text"]
    for setting in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        assert (
            complete(client, max_tokens=12, **{"temperature": 1.5, **setting})["choices"][0]["text"]
            == greedy_text
        )


def test_a_stop_string_is_cut_off_and_counted(client, tokenizer):
    whole = complete(client, max_tokens=40, ignore_eos=True, return_token_ids=True)["choices"][0]
    stop = whole["text"][11:15]
    cut = whole["text"][: whole["text"].index(stop)]
    answer = complete(client, max_tokens=40, ignore_eos=True, stop=stop, return_token_ids=True)
    choice = answer["choices"][0]
    assert choice["text"] == cut and choice["finish_reason"] == "stop"
    counted = answer["usage"]["completion_tokens"]
    assert counted == len(choice["token_ids"]) < 40
    assert stop in tokenizer.decode(whole["token_ids"][:counted])
    assert stop not in tokenizer.decode(whole["token_ids"][: counted - 1])
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 40, "ignore_eos": True}
    chunks = events(client, "/v1/completions", **body, stop=["never this", stop])
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == cut
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_a_stop_token_ends_the_sequence_and_is_not_shown(client, tokenizer):
    whole = complete(client, max_tokens=20, ignore_eos=True, return_token_ids=True)["choices"][0]["token_ids"]
    stop = whole[7]
    shown = whole[: whole.index(stop)]
    answer = complete(client, max_tokens=20, stop_token_ids=[stop])
    assert answer["choices"][0]["text"] == tokenizer.decode(shown)
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == len(shown) + 1


def test_penalties_bias_and_min_tokens_reach_the_engine(client, tokenizer):
    body = {"max_tokens": 24, "return_token_ids": True}
    plain = complete(client, ignore_eos=True, **body)["choices"][0]["token_ids"]
    first = {str(plain[0]): -100}
    for setting in ({"repetition_penalty": 1.5}, {"presence_penalty": 2}, {"frequency_penalty": 2}):
        assert complete(client, ignore_eos=True, **body, **setting)["choices"][0]["token_ids"] != plain
    biased = complete(client, ignore_eos=True, logit_bias=first, **body)["choices"][0]["token_ids"]
    assert plain[0] not in biased
    stop = {"stop_token_ids": [plain[2]], "min_tokens": 10}
    assert complete(client, **body, **stop)["usage"]["completion_tokens"] >= 10
    stop = {"stop": tokenizer.decode(plain[2]), "min_tokens": 10, "ignore_eos": True}
    assert complete(client, **body, **stop)["usage"]["completion_tokens"] >= 10


def test_special_tokens_are_shown_where_asked_for(client, tokenizer):
    [end] = tokenizer.all_special_ids[:1]
    body = {"logit_bias": {str(end): 100}, "max_tokens": 2, "ignore_eos": True}
    assert complete(client, **body)["choices"][0]["text"] == ""
    shown = complete(client, skip_special_tokens=False, **body)["choices"][0]["text"]
    assert shown == 2 * tokenizer.decode([end])


def test_completion_logprobs(client):
    choice = complete(client, max_tokens=8, ignore_eos=True, logprobs=3)["choices"][0]
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert all(len(top) == 3 for top in logprobs["top_logprobs"])
    for token, logprob, top in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert logprob <= 0
        assert top[token] == pytest.approx(logprob) == max(top.values())
    assert logprobs["text_offset"][2] == len("".join(logprobs["tokens"][:2]))
    assert complete(client, max_tokens=2)["choices"][0]["logprobs"] is None


def test_echo_puts_the_prompt_before_the_text(client):
    plain = complete(client, max_tokens=5)["choices"][0]["text"]
    assert complete(client, max_tokens=5, echo=True)["choices"][0]["text"] == PROMPT + plain
    chunks = events(client, "/v1/completions", prompt=PROMPT, temperature=0, max_tokens=5, echo=True)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == PROMPT + plain


def test_echo_with_logprobs_covers_the_prompt_whole_or_streamed(client, tokenizer, likelihood):
    prompt = tokenizer.encode(PROMPT)
    body = {"prompt": PROMPT, "temperature": 0, "echo": True, "logprobs": 2, "ignore_eos": True}
    for length in (0, 3):
        answer = complete(client, max_tokens=length, return_token_ids=True, **body)
        choice = answer["choices"][0]
        found, tokens = choice["logprobs"], prompt + choice["token_ids"]
        assert found["tokens"] == [tokenizer.decode([token]) for token in tokens]
        assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
        assert found["token_logprobs"][1:] == pytest.approx(likelihood(tokens), abs=1e-4)
        assert found["text_offset"] == [len("".join(found["tokens"][:i])) for i in range(len(tokens))]
        assert answer["usage"]["completion_tokens"] == length and choice["finish_reason"] == "length"
        # As lm-eval reads whether a token is the likeliest.
        for logprob, top in zip(found["token_logprobs"][1:], found["top_logprobs"][1:], strict=True):
            assert logprob <= max(top.values())
        chunks = [e["choices"][0] for e in events(client, "/v1/completions", max_tokens=length, **body)]
        assert "".join(chunk["text"] for chunk in chunks) == choice["text"]
        streamed = [value for chunk in chunks for value in chunk["logprobs"]["token_logprobs"]]
        assert streamed[1:] == pytest.approx(found["token_logprobs"][1:], abs=1e-5)


def test_prompt_logprobs_by_token_id(client, tokenizer, likelihood):
    prompt = tokenizer.encode(PROMPT)
    expected = likelihood(prompt)
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "prompt_logprobs": 1}
    assert client.post("/v1/chat/completions", json=chat).json()["choices"][0]["prompt_logprobs"][0] is None
    first, *rest = complete(client, max_tokens=1, prompt_logprobs=2)["choices"][0]["prompt_logprobs"]
    assert first is None
    for token, entries, logprob in zip(prompt[1:], rest, expected, strict=True):
        assert entries[str(token)]["logprob"] == pytest.approx(logprob, abs=1e-4)
        assert entries[str(token)]["decoded_token"] == tokenizer.decode([token])
        by_rank = sorted(entries.values(), key=lambda entry: entry["rank"])
        assert [entry["rank"] for entry in by_rank[:2]] == [1, 2]
        assert by_rank == sorted(by_rank, key=lambda entry: -entry["logprob"])


def test_a_prompt_as_long_as_the_context_is_scored(client):
    answer = complete(client, prompt=[1] * 512, max_tokens=0, echo=True, logprobs=1)
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == 512


def test_chat_goes_through_the_template(client, tokenizer):
    messages = [
        {"role": "system", "content": "Write Python."},
        {"role": "user", "content": [{"type": "text", "text": "def a():"}, {"type": "text", "text": "pass"}]},
    ]
    text = "# system: Write Python.\n# user: def a():\npass\n# assistant: "
    body = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
    answer = client.post("/v1/chat/completions", json={"messages": messages, **body}).json()
    expected = complete(client, prompt=text, **body)
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"]["role"] == "assistant"
    assert answer["choices"][0]["message"]["content"] == expected["choices"][0]["text"]
    assert answer["usage"] == expected["usage"]
    chunks = events(client, "/v1/chat/completions", messages=messages, **body)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    streamed = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert streamed == expected["choices"][0]["text"]
    assert not any("prompt_token_ids" in chunk for chunk in chunks)
    chunks = events(client, "/v1/chat/completions", messages=messages, return_token_ids=True, **body)
    told = [chunk["prompt_token_ids"] for chunk in chunks if "prompt_token_ids" in chunk]
    assert told == [tokenizer.encode(text)]


def test_chat_logprobs(client):
    body = {"messages": [{"role": "user", "content": "x"}], "max_completion_tokens": 4, "temperature": 0}
    choice = client.post(
        "/v1/chat/completions", json={**body, "logprobs": True, "top_logprobs": 2, "ignore_eos": True}
    ).json()["choices"][0]
    content = choice["logprobs"]["content"]
    assert len(content) == 4
    for entry in content:
        assert bytes(entry["bytes"]).decode() == entry["token"]
        assert entry["top_logprobs"][0]["token"] == entry["token"]
        assert len(entry["top_logprobs"]) == 2


def test_without_max_tokens_a_completion_has_sixteen_and_chat_the_rest_of_the_context(client):
    assert complete(client, ignore_eos=True)["usage"]["completion_tokens"] == 16
    messages = [{"role": "user", "content": "x"}]
    answer = client.post(
        "/v1/chat/completions", json={"messages": messages, "ignore_eos": True, "temperature": 0}
    ).json()
    assert answer["usage"]["total_tokens"] == 512
    assert answer["choices"][0]["finish_reason"] == "length"


def test_models_health_version_and_metrics(client):
    models = client.get("/v1/models").json()
    assert models["object"] == "list"
    assert models["data"][0]["id"] == "pycode" and models["data"][0]["max_model_len"] == 512
    assert client.get("/health").status_code == 200
    assert client.get("/version").json()["version"]
    complete(client, max_tokens=4)
    text = client.get("/metrics").text
    for name in (
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:num_preemptions_total",
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        "vllm:time_to_first_token_seconds_bucket",
        "vllm:inter_token_latency_seconds_sum",
        "vllm:e2e_request_latency_seconds_count",
        "vllm:request_success_total",
        'scalegate:engine_steps_total{model_name="pycode",running="1"}',
    ):
        assert name in text, name


def test_one_model_by_its_name(client):
    assert client.get("/v1/models/pycode").json() == client.get("/v1/models").json()["data"][0]
    assert client.get("/v1/models/org/other").status_code == 404


def test_texts_to_tokens_and_back(client, tokenizer):
    ids = tokenizer.encode(PROMPT)
    answer = client.post("/tokenize", json={"prompt": PROMPT, "return_token_strs": True}).json()
    assert answer["tokens"] == ids and answer["count"] == len(ids) and answer["max_model_len"] == 512
    assert "".join(answer["token_strs"]) == PROMPT
    assert client.post("/detokenize", json={"tokens": ids}).json() == {"prompt": PROMPT}
    assert client.post("/detokenize", json={"tokens": [9000]}).status_code == 400
    chat = client.post("/tokenize", json={"messages": [{"role": "user", "content": "x"}]}).json()
    assert tokenizer.decode(chat["tokens"]) == "# user: x\n# assistant: "
