"""The `openai` package against a real server: chat and completions, streaming, 64 requests at once."""

import asyncio
from dataclasses import dataclass

import openai
import pytest
from transformers import AutoTokenizer

CONCURRENCY = 64
OUTPUT = 20


@dataclass
class Answer:
    text: str
    finish_reason: str | None
    prompt_tokens: int
    completion_tokens: int


@pytest.fixture(scope="module")
def tokenizer(chat_checkpoint):
    return AutoTokenizer.from_pretrained(chat_checkpoint)


def prompt(index: int) -> str:
    """Prompts of different lengths."""
    return f"def task_{index}(value):\n" + "    value += 1\n" * (index % 7)


async def complete(client: openai.AsyncOpenAI, index: int, stream: bool) -> Answer:
    body = {"model": "pycode", "prompt": prompt(index), "max_tokens": OUTPUT, "temperature": 0}
    extra = {"ignore_eos": True}
    if not stream:
        whole = await client.completions.create(**body, extra_body=extra)
        choice, usage = whole.choices[0], whole.usage
        return Answer(choice.text, choice.finish_reason, usage.prompt_tokens, usage.completion_tokens)
    answer = Answer("", None, 0, 0)
    options = {"include_usage": True}
    async for chunk in await client.completions.create(
        **body, stream=True, stream_options=options, extra_body=extra
    ):
        for choice in chunk.choices:
            answer.text += choice.text
            answer.finish_reason = choice.finish_reason or answer.finish_reason
        if chunk.usage:
            answer.prompt_tokens = chunk.usage.prompt_tokens
            answer.completion_tokens = chunk.usage.completion_tokens
    return answer


async def chat(client: openai.AsyncOpenAI, index: int, stream: bool) -> Answer:
    messages = [{"role": "user", "content": prompt(index)}]
    body = {"model": "pycode", "messages": messages, "max_completion_tokens": OUTPUT, "temperature": 0}
    extra = {"ignore_eos": True}
    if not stream:
        whole = await client.chat.completions.create(**body, extra_body=extra)
        choice, usage = whole.choices[0], whole.usage
        return Answer(
            choice.message.content, choice.finish_reason, usage.prompt_tokens, usage.completion_tokens
        )
    answer = Answer("", None, 0, 0)
    options = {"include_usage": True}
    async for chunk in await client.chat.completions.create(
        **body, stream=True, stream_options=options, extra_body=extra
    ):
        for choice in chunk.choices:
            answer.text += choice.delta.content or ""
            answer.finish_reason = choice.finish_reason or answer.finish_reason
        if chunk.usage:
            answer.prompt_tokens = chunk.usage.prompt_tokens
            answer.completion_tokens = chunk.usage.completion_tokens
    return answer


def ask_all(server, ask, stream: bool) -> list[Answer]:
    async def run() -> list[Answer]:
        async with openai.AsyncOpenAI(
            base_url=server.base_url + "/v1", api_key="none", max_retries=0
        ) as client:
            return await asyncio.gather(*(ask(client, index, stream) for index in range(CONCURRENCY)))

    return asyncio.run(run())


@pytest.mark.parametrize("ask", [complete, chat])
def test_64_at_once_streamed_or_not_give_the_same_texts_and_exact_counts(server, tokenizer, ask):
    streamed, whole = ask_all(server, ask, True), ask_all(server, ask, False)
    for index, (part, other) in enumerate(zip(streamed, whole, strict=True)):
        text = prompt(index)
        sent = text if ask is complete else f"# user: {text}\n# assistant: "
        assert part.prompt_tokens == other.prompt_tokens == len(tokenizer.encode(sent))
        assert part.completion_tokens == other.completion_tokens == OUTPUT
        assert part.finish_reason == other.finish_reason == "length"
        assert part.text == other.text
    assert len({answer.text for answer in whole}) > 1


def test_errors_arrive_as_the_packages_own_exceptions(server):
    client = openai.OpenAI(base_url=server.base_url + "/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.NotFoundError, match="is not served here"):
        client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.BadRequestError) as raised:
        client.completions.create(model="pycode", prompt="x", max_tokens=600)
    assert raised.value.code == "context_length_exceeded" and raised.value.param == "max_tokens"
    assert [model.id for model in client.models.list()] == ["pycode"]
