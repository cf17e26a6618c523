"""CUDA graphs that share one memory pool, since no two of them run at the same time."""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch

Result = TypeVar("Result")


class CudaGraphs(Generic[Result]):
    """CUDA graphs by key, all in one memory pool."""

    def __init__(self) -> None:
        self.captured: dict[Hashable, tuple[torch.cuda.CUDAGraph, Result]] = {}
        self._pool: Any = None

    def __contains__(self, key: Hashable) -> bool:
        return key in self.captured

    def capture(self, key: Hashable, run: Callable[[], Result]) -> None:
        """Call `run` once to warm up, then capture it."""
        self.captured[key] = self._record(run)

    def replay(self, key: Hashable) -> Result:
        """Launch a graph and return its result, whose tensors are valid until the next launch of a graph."""
        graph, result = self.captured[key]
        graph.replay()
        return result

    def _record(self, run: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
        with _side_stream():
            run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = run()
        self._pool = graph.pool()
        return graph, result


@contextmanager
def _side_stream() -> Iterator[None]:
    """The stream is for the warm-up before a capture, which must not run on the default stream."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)
