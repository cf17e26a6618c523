"""CUDA graphs that share one pool of memory, since no two of them ever run at the same time."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")


class GraphMemory:
    """Captures graphs, each into the memory that the ones before it took."""

    def __init__(self) -> None:
        self._pool: Any = None

    def capture(self, run: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
        """The graph of `run`, and what it returns: tensors that are good until another graph is launched."""
        with _side_stream():
            run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = run()
        self._pool = graph.pool()
        return graph, result


@contextmanager
def _side_stream() -> Iterator[None]:
    """A warm-up run before capture belongs on another stream than the default one."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)
