"""Functions of many small operations, recorded as a CUDA graph and replayed.

Launching the operations one by one takes longer than running them. On a CPU the functions are called as they
are.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Choose = Callable[..., tuple[Tensor, ...]]


def with_graph_replay(function: Choose) -> Choose:
    """Return `function` of tensors on one device; on a GPU it is recorded once for each set of shapes.

    The function must launch the same operations whatever the numbers are, and wait for none of them.
    """
    recordings: dict[tuple[torch.Size, ...], _Recording] = {}

    def call(*given: Tensor) -> tuple[Tensor, ...]:
        if not given[0].is_cuda:
            return function(*given)
        shapes = tuple(tensor.shape for tensor in given)
        if shapes not in recordings:
            recordings[shapes] = _record(function, given)
        return recordings[shapes](*given)

    return call


@dataclass(frozen=True)
class _Recording:
    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]

    def __call__(self, *given: Tensor) -> tuple[Tensor, ...]:
        for place, tensor in zip(self.inputs, given, strict=True):
            place.copy_(tensor)
        self.graph.replay()
        return tuple(output.clone() for output in self.outputs)


def _record(function: Choose, given: tuple[Tensor, ...]) -> _Recording:
    inputs = tuple(tensor.contiguous().clone() for tensor in given)
    function(*inputs)  # what is made ready once must not be recorded
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = function(*inputs)
    return _Recording(graph, inputs, outputs)
