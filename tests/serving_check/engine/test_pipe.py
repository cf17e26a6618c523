"""The pipe between the API's process and the engine's: nothing is lost where it is full, on any loop."""

import asyncio
import functools
import os
import signal
import threading
from collections.abc import Coroutine

import psutil
import pytest
from scalegate.serving_check.engine.request import SamplingParams
from scalegate.serving_check.server.engine_client import EngineClient, Mailbox
from scalegate.serving_check.server.fork_server import ADDRESS
from scalegate.serving_check.server.metrics import Metrics
from scalegate.serving_check.server.model_description import ModelDescription
from scalegate.tests.serving_check.counting_server import CountingEngine

PROMPT = list(range(1, 4097))
REQUESTS = 100
"""With such prompts several times what a pipe holds, which is some 200 kB."""
LONG_PROMPT = PROMPT * 4
"""50 kB, and its log-probabilities 500."""


class LoopAsUvloop(asyncio.SelectorEventLoop):
    """Makes what it listens on non-blocking, as libuv and so uvloop does."""

    def add_reader(self, fd, callback, *args):
        os.set_blocking(fd, False)
        return super().add_reader(fd, callback, *args)


def run(loop_of, main: Coroutine) -> None:
    with asyncio.Runner(loop_factory=loop_of) as runner:
        runner.run(asyncio.wait_for(main, 60))


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(ADDRESS, raising=False)  # a child of ours, which can be stopped
    before = set(psutil.Process().children())
    client = EngineClient(
        functools.partial(ModelDescription, None), functools.partial(CountingEngine, 0.001), Metrics()
    )
    client.wait_until_described()
    client.wait_until_ready()
    started = set(psutil.Process().children()) - before
    client.engine = next(child for child in started if "spawn_main" in " ".join(child.cmdline()))
    yield client
    client.close()


loops = pytest.mark.parametrize("loop_of", [asyncio.SelectorEventLoop, LoopAsUvloop])


@loops
def test_more_prompts_than_the_pipe_holds_reach_an_engine_that_is_busy(client, loop_of):
    async def main():
        client.listen()
        client.engine.send_signal(signal.SIGSTOP)
        threading.Timer(0.5, client.engine.send_signal, [signal.SIGCONT]).start()
        mailboxes = [Mailbox() for _ in range(REQUESTS)]
        for number, mailbox in enumerate(mailboxes):
            client.submit(f"r{number}", 0, PROMPT, SamplingParams(max_tokens=1), mailbox)
        for mailbox in mailboxes:
            assert (await mailbox.take())[0].token_ids == [1]

    run(loop_of, main())
    assert client.dead is None


@loops
def test_an_answer_larger_than_the_pipe_arrives_whole(client, loop_of):
    async def main():
        client.listen()
        mailbox = Mailbox()
        client.submit("r", 0, LONG_PROMPT, SamplingParams(max_tokens=1, prompt_logprobs=0), mailbox)
        of_prompt = (await mailbox.take())[0].prompt_logprobs
        assert [logprobs.logprob for logprobs in of_prompt] == [-float(token) for token in LONG_PROMPT[1:]]

    run(loop_of, main())
    assert client.dead is None
