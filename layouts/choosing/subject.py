"""The subject of a timing: random weights and inputs for a problem, and the calls that multiply them.

A dense layer is called as in a decode step, a module on x [M, 1, K]. For experts, each of M tokens is
multiplied by `top_k` different experts, so that an expert gets as many rows as in serving.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from ..formats.input_format import dynamic_input, example_input
from ..formats.unquantized import Unquantized, UnquantizedWeight
from ..modules.linear import QuantizedLinear
from ..packing.layout import LAYOUTS, AnyLayout, ExpertsLayout, Layout, PackedWeight, Problem
from ..packing.routing import Routing

ROUTINGS = 16
"""Random routings that calls use in turn, so that a GPU's cache does not keep one routing's weights."""


class Subject(Protocol):
    """One problem to be timed."""

    def pack(self, layout: AnyLayout) -> PackedWeight: ...

    def baselines(self) -> list[PackedWeight]:
        """The unquantized weight, packed in each layout in which a server may hold it."""
        ...

    def call(self, packed: Sequence[PackedWeight], m: int) -> Callable[[int], Tensor]:
        """Return a function of i that multiplies once by the i-th copy of the packed weight and returns y
        [..., N].
        """
        ...

    def expected(self, m: int) -> Tensor:
        """Return the correct result of `call(packed, m)(0)`, fp32 [rows, N]."""
        ...

    @property
    def draws(self) -> int:
        """Return how many different inputs the calls use in turn."""
        ...


def subject_of(problem: Problem, most: int) -> Subject:
    """Make random weights and inputs for every M up to `most`, on the problem's device."""
    return _DenseSubject(problem, most) if problem.experts is None else _ExpertsSubject(problem, most)


class _DenseSubject:
    def __init__(self, problem: Problem, most: int):
        self.problem = problem
        self.weight = problem.spec.random(problem.n, problem.k, problem.device)
        x = torch.randn(most, 1, problem.k, device=problem.device)
        # Values of the format stay as they are if a layout rounds them again.
        by_layer = example_input(problem.spec)
        self.x = (x if by_layer is None else by_layer.round(x)).to(problem.dtype)
        self.dense = self.weight.dequantize(torch.float32)
        self.y = _rounded(self.x[:, 0].float(), problem) @ self.dense.T

    def pack(self, layout: AnyLayout) -> PackedWeight:
        return cast(Layout, layout).pack(self.weight, self.problem.dtype)

    def baselines(self) -> list[PackedWeight]:
        unquantized = UnquantizedWeight(Unquantized(), self.dense)
        layouts = cast(list[Layout], baseline_layouts(self.problem))
        return [layout.pack(unquantized, self.problem.dtype) for layout in layouts]

    def call(self, packed: Sequence[PackedWeight], m: int) -> Callable[[int], Tensor]:
        modules = [_module(weight) for weight in packed]
        x = self.x[:m]
        return lambda copy: modules[copy](x)

    def expected(self, m: int) -> Tensor:
        return self.y[:m]

    @property
    def draws(self) -> int:
        return 1


class _ExpertsSubject:
    def __init__(self, problem: Problem, most: int):
        if problem.experts is None:
            raise ValueError("a problem without experts")
        self.problem = problem
        count, top_k = problem.experts.count, problem.experts.top_k
        device = problem.device
        self.weights = [problem.spec.random(problem.n, problem.k, device) for _ in range(count)]
        # Rounded here: a model's module rounds them outside of most layouts' products.
        self.x = _rounded(torch.randn(most, problem.k, device=device), problem).to(problem.dtype)
        draws = torch.rand(ROUTINGS, most, count, device=device)
        self.expert = draws.argsort(-1)[..., :top_k].contiguous()
        """[draws, most, top_k]: the experts of each token. They are distinct, and all are equally likely."""
        self.y = torch.empty(most, top_k, problem.n, device=device)
        for index, weight in enumerate(self.weights):
            token, choice = (self.expert[0] == index).nonzero(as_tuple=True)
            self.y[token, choice] = self.x[token].float() @ weight.dequantize(torch.float32).T

    def pack(self, layout: AnyLayout) -> PackedWeight:
        return cast(ExpertsLayout, layout).pack_experts(self.weights, self.problem.dtype)

    def baselines(self) -> list[PackedWeight]:
        weights = [UnquantizedWeight(Unquantized(), w.dequantize(self.problem.dtype)) for w in self.weights]
        layouts = cast(list[ExpertsLayout], baseline_layouts(self.problem))
        return [layout.pack_experts(weights, self.problem.dtype) for layout in layouts]

    def call(self, packed: Sequence[PackedWeight], m: int) -> Callable[[int], Tensor]:
        layout = cast(ExpertsLayout, LAYOUTS[packed[0].layout])
        count, mode = len(self.weights), self.problem.batch_invariance
        routings = [Routing.of(expert[:m].contiguous(), count, mode) for expert in self.expert]
        x, copies = self.x[:m], len(packed)
        return lambda copy: layout.grouped_matmul(x, packed[copy % copies], routings[copy % ROUTINGS])

    def expected(self, m: int) -> Tensor:
        return self.y[:m].flatten(0, 1)

    @property
    def draws(self) -> int:
        return ROUTINGS


def baseline_layouts(problem: Problem) -> list[AnyLayout]:
    """Return the layouts of the unquantized weight that a problem's layouts are compared with.

    A server on a CPU holds linear layers in the fastest layout (`linear_packing.pack_fastest`), so all are
    timed on a CPU. On a GPU, and for experts, the only layout is torch's own product.
    """
    unquantized = replace(problem, spec=Unquantized(), batch_invariance="tuned")
    layouts = [layout for _, layout in LAYOUTS.items() if layout.refuses(unquantized) is None]
    return layouts if problem.device.type == "cpu" and problem.experts is None else layouts[:1]


def _rounded(x: Tensor, problem: Problem) -> Tensor:
    """Return the inputs x in fp32, rounded as the format requires."""
    input_format = dynamic_input(problem.spec)
    return x if input_format is None else input_format.round(x)


def _module(packed: PackedWeight) -> nn.Module:
    """Return the module that a model would have; for torch's own product, torch's own module."""
    if packed.layout != "torch_linear":
        return QuantizedLinear(packed, None)
    n, k = packed.shape
    linear = nn.Linear(k, n, bias=False, device="meta")
    linear.weight = nn.Parameter(packed.tensors["weight"], requires_grad=False)
    return linear
