"""The counting server, tired by what it has served: the negative control of the look at rest.

    python -P tiring_server.py FAULT

A fault is the name of one of the engines below; `none` is a sound one.
"""

import functools
import sys
import time
from collections.abc import Sequence

from scalegate.serving_check.engine.request import EngineStats, SamplingParams, StepOutput
from scalegate.serving_check.server.model_description import ModelDescription
from scalegate.serving_check.server.run import ServerOptions, run_server
from scalegate.tests.serving_check.counting_server import CountingEngine

KEPT_BYTES = 256 << 10
TIRED_AFTER = 130
TIRED_S = 0.1
"""Added to each step: with less, a burst's requests in flight hide it."""
ENDLESS = 10**9


class KeepsPages(CountingEngine):
    """Of aborted requests."""

    kept = 0

    def abort(self, request_id: str) -> None:
        self.kept += request_id in self.running
        super().abort(request_id)

    def stats(self) -> EngineStats:
        stats = super().stats()
        return EngineStats(**{**vars(stats), "kv_cache_usage": stats.kv_cache_usage + self.kept / 1000})


class KeepsRequests(CountingEngine):
    """It goes on with requests whose clients have gone."""

    def abort(self, request_id: str) -> None:
        if request_id in self.running:
            self.running[request_id] = (0, ENDLESS)


class RunsOn(CountingEngine):
    """It goes on with requests whose clients have gone, to the last token that they asked for."""

    def abort(self, request_id: str) -> None:
        pass


class KeepsMemory(CountingEngine):
    def __init__(self, step_seconds: float, description: ModelDescription):
        super().__init__(step_seconds, description)
        self.kept: list[bytes] = []

    def add_request(self, request_id: str, prompt: Sequence[int], params: SamplingParams) -> None:
        super().add_request(request_id, prompt, params)
        self.kept.append(b"x" * KEPT_BYTES)


class KeepsMemoryOfSampled(KeepsMemory):
    """Of requests at a temperature alone."""

    def add_request(self, request_id: str, prompt: Sequence[int], params: SamplingParams) -> None:
        super().add_request(request_id, prompt, params)
        if not params.temperature:
            self.kept.pop()


class Tires(CountingEngine):
    """After so many requests each step takes longer."""

    seen = 0

    def add_request(self, request_id: str, prompt: Sequence[int], params: SamplingParams) -> None:
        super().add_request(request_id, prompt, params)
        self.seen += 1

    def step(self) -> list[StepOutput]:
        if self.seen > TIRED_AFTER:
            time.sleep(TIRED_S)
        return super().step()


ENGINES = {
    "none": CountingEngine,
    "keeps_pages": KeepsPages,
    "keeps_requests": KeepsRequests,
    "runs_on": RunsOn,
    "keeps_memory": KeepsMemory,
    "keeps_memory_of_sampled": KeepsMemoryOfSampled,
    "tires": Tires,
}

if __name__ == "__main__":
    run_server(
        ServerOptions(port=0),
        "tiring",
        functools.partial(ModelDescription, None),
        functools.partial(ENGINES[sys.argv[1]], 0.001),
    )
