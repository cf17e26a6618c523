"""A server with eight-bit keys and values, some of whose clients leave."""

import asyncio
import json

import httpx
import pytest
from scalegate.serving_check.adapters import SubprocessEndpoint
from scalegate.serving_check.adapters.prometheus_text import parse_metrics, total

REQUESTS, OUTPUT = 9, 32


@pytest.fixture(scope="module")
def fp8_server(example_checkpoint, serve_command, tmp_path_factory):
    options = ["--served-model-name", "pycode", "--dtype", "float32", "--max-num-seqs", "16"]
    options += ["--max-model-len", "256", "--kv-cache-tokens", "1024", "--kv-cache-dtype", "fp8"]
    log = tmp_path_factory.mktemp("server") / "log.txt"
    with SubprocessEndpoint(serve_command(example_checkpoint, *options), "pycode", log=log) as endpoint:
        yield endpoint


def body(index: int) -> dict:
    prompt = f"def task_{index}(value):\n" + "    value += 1\n" * (2 * index)
    return {"prompt": prompt, "max_tokens": OUTPUT, "temperature": 0, "ignore_eos": True}


async def stream(client: httpx.AsyncClient, index: int, chunks: int | None) -> str:
    """The text of one request; with `chunks`, its client leaves after that many."""
    text = ""
    async with client.stream("POST", "/v1/completions", json={**body(index), "stream": True}) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
                chunks = None if chunks is None else chunks - 1
            if chunks == 0:
                break
    return text


def test_those_who_stay_get_the_tokens_they_get_alone(fp8_server):
    async def alone_and_together() -> tuple[list[str], list[str]]:
        async with httpx.AsyncClient(base_url=fp8_server.base_url, timeout=120) as client:
            alone = [await stream(client, index, None) for index in range(REQUESTS)]
            leaving = {index: 3 + index for index in range(0, REQUESTS, 3)}
            together = await asyncio.gather(
                *(stream(client, index, leaving.get(index)) for index in range(REQUESTS))
            )
            return alone, list(together)

    alone, together = asyncio.run(alone_and_together())
    assert len(set(alone)) > REQUESTS // 2
    for index, text in enumerate(together):
        assert (text == alone[index]) if index % 3 else (text and alone[index].startswith(text))

    def figure(name: str) -> float | None:
        return total(parse_metrics(httpx.get(fp8_server.base_url + "/metrics").text), name)

    async def pool_empties() -> None:
        while figure("vllm:num_requests_running") or figure("vllm:kv_cache_usage_perc"):
            await asyncio.sleep(0.05)

    asyncio.run(asyncio.wait_for(pool_empties(), 30))
    config = httpx.get(fp8_server.base_url + "/metrics").text
    assert 'cache_dtype="fp8"' in config
