"""What ds4-nvfp4-spark issue 6 asked for, line by line, of an NVFP4 checkpoint behind the real server.

The third line, NVFP4 above IQ2_XXS once batched, is the rival check's (`test_rival.py`); its figures are
taken on a GPU, where the two formats have kernels of their own: `test_ds4_nvfp4_spark_6_gpu.py` of a layer's
products, `bench/rival.py` of servers.
"""

import asyncio
from pathlib import Path

import openai
import pytest
from scalegate.pipeline.commands.quantize import quantize
from scalegate.serving_check.adapters import Endpoint, SubprocessEndpoint
from scalegate.serving_check.adapters.prometheus_text import by_label
from scalegate.serving_check.workload import WorkloadSpec, run_workload

pytestmark = pytest.mark.alone

TOGETHER = 8
MOST_TPOT = 4.0
"""Times the TPOT of one request, where eight decode together: eight would be one after the other."""
LEAST_AGGREGATE = 2.0
"""Times the throughput of one request."""


@pytest.fixture(scope="module")
def nvfp4_server(chat_checkpoint: Path, serve_command, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("nvfp4") / "artifact"
    quantize(str(chat_checkpoint), "nvfp4", out=folder, progress=False)
    options = ["--served-model-name", "pycode", "--max-num-seqs", "16", "--max-model-len", "512"]
    command = serve_command(folder, *options, "--kv-cache-tokens", "8192")
    with SubprocessEndpoint(command, "pycode", log=folder.parent / "log.txt") as endpoint:
        yield endpoint


async def chat(endpoint: Endpoint, requests: int) -> list[int]:
    """Output tokens of so many conversations at once."""
    client = openai.AsyncOpenAI(base_url=f"{endpoint.base_url}/v1", api_key="none")

    async def one(index: int) -> int:
        answer = await client.chat.completions.create(
            model=endpoint.model,
            messages=[{"role": "user", "content": f"Write function number {index}."}],
            max_tokens=48,
            temperature=0,
            extra_body={"ignore_eos": True},
        )
        assert answer.usage is not None
        return answer.usage.completion_tokens

    return await asyncio.gather(*(one(index) for index in range(requests)))


def test_several_chat_completions_are_decoded_in_one_batched_pass(nvfp4_server: Endpoint):
    """By the engine's own count of its steps, each one forward pass over so many requests."""
    series = nvfp4_server.series.steps_by_running
    before = by_label(nvfp4_server.metrics(), series, "running")
    assert asyncio.run(chat(nvfp4_server, TOGETHER)) == [48] * TOGETHER
    after = by_label(nvfp4_server.metrics(), series, "running")
    steps = {running: count - before.get(running, 0) for running, count in after.items()}
    assert steps.get(str(TOGETHER), 0) >= 24, steps
    assert sum(steps.values()) < TOGETHER * 48 / 2, "one after the other would take a step a token"


def test_latency_stays_bounded_while_the_aggregate_scales(nvfp4_server: Endpoint):
    def run(m: int, seed: int):
        return run_workload(
            nvfp4_server, WorkloadSpec(m=m, num_requests=m, input_len=32, output_len=64, seed=seed)
        )

    run(TOGETHER, 0)
    alone, together = [
        min((run(m, seed) for seed in (1, 2, 3)), key=lambda r: r.duration) for m in (1, TOGETHER)
    ]
    assert not alone.errors and not together.errors
    speeds = [result.output_tokens / result.duration for result in (alone, together)]
    assert speeds[1] >= LEAST_AGGREGATE * speeds[0], speeds
    assert max(together.tpots) <= MOST_TPOT * max(alone.tpots)
