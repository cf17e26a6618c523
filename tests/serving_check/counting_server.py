"""The real server over an engine without a model: every request gets the tokens 1, 2, 3, … one a step.

It starts in a second, for tests of processes and sockets:
`python -P counting_server.py STEP_SECONDS [KEY] [--unread SECONDS]`.
"""

import argparse
import functools
import time
from collections.abc import Sequence

from scalegate.base.errors import UserError
from scalegate.serving_check.engine.jit_monitor import JitMonitor
from scalegate.serving_check.engine.request import (
    EngineCapacity,
    EngineStats,
    SamplingParams,
    StepOutput,
    TokenLogprobs,
)
from scalegate.serving_check.server.limits import ServerLimits
from scalegate.serving_check.server.model_description import ModelDescription
from scalegate.serving_check.server.run import ServerOptions, run_server

REFUSED, FATAL, BREAKING = 666, 667, 668
"""Prompts of one such token: refused by the engine, the end of the engine, and the end of that request."""


class CountingEngine:
    max_model_len = 4096
    vocab_size = 8192
    capacity = EngineCapacity(max_num_seqs=1000, kv_cache_pages=1000, page_size=16)
    jit_monitor = JitMonitor("off")

    def __init__(self, step_seconds: float, description: ModelDescription):
        self.step_seconds = step_seconds
        self.running: dict[str, tuple[int, int]] = {}
        self.steps = 0
        self.generated = 0
        self.running_by_step: list[int] = []
        self.breaking: dict[str, int] = {}
        self.prompt_logprobs: dict[str, tuple[TokenLogprobs, ...]] = {}

    @property
    def has_work(self) -> bool:
        return bool(self.running)

    def warm_up(self, progress: bool | None = None) -> None:
        pass

    def add_request(self, request_id: str, prompt: Sequence[int], params: SamplingParams) -> None:
        if list(prompt) == [REFUSED]:
            raise UserError("this engine never takes that prompt")
        if list(prompt) in ([FATAL], [BREAKING]):
            self.breaking[request_id] = prompt[0]
        self.running[request_id] = (0, params.max_tokens)
        if params.prompt_logprobs is not None:
            self.prompt_logprobs[request_id] = tuple(TokenLogprobs(-float(token)) for token in prompt[1:])

    def abort(self, request_id: str) -> None:
        self.running.pop(request_id, None)

    def recover(self) -> list[str]:
        if FATAL in self.breaking.values():
            raise RuntimeError("the engine broke")
        broken, self.breaking = list(self.breaking), {}
        for request_id in broken:
            del self.running[request_id]
        return broken

    def step(self) -> list[StepOutput]:
        if self.breaking:
            raise RuntimeError("the step broke")
        time.sleep(self.step_seconds)
        self.steps += 1
        self.generated += len(self.running)
        self.running_by_step.append(len(self.running))
        outputs = []
        for request_id, (count, limit) in list(self.running.items()):
            self.running[request_id] = (count + 1, limit)
            reason = "length" if count + 1 == limit else None
            of_prompt = self.prompt_logprobs.pop(request_id, None)
            outputs.append(StepOutput(request_id, (count + 1,), (), reason, of_prompt))
            if reason:
                del self.running[request_id]
        return outputs

    def stats(self) -> EngineStats:
        by_step, self.running_by_step = tuple(self.running_by_step), []
        return EngineStats(
            running=len(self.running),
            waiting=0,
            kv_cache_usage=len(self.running) / 1000,
            preemptions=0,
            prompt_tokens=0,
            generation_tokens=self.generated,
            steps=self.steps,
            running_by_step=by_step,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("step_seconds", type=float)
    parser.add_argument("key", nargs="?")
    parser.add_argument("--unread", type=int, default=ServerLimits.unread_seconds)
    parser.add_argument("--port", type=int, default=0)
    given = parser.parse_args()
    run_server(
        ServerOptions(port=given.port, api_key=given.key, limits=ServerLimits(unread_seconds=given.unread)),
        "counting",
        functools.partial(ModelDescription, None),
        functools.partial(CountingEngine, given.step_seconds),
    )
