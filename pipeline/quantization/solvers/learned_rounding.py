"""Learned rounding: which way each number of a layer is rounded, by the error of the layer's output.

GPTQ judges each weight by its own outputs. Here all weights of a layer are judged together, by what the layer
makes of a text, behind attention and activation functions (AdaRound: Nagel et al. 2020, arXiv 2004.10568;
BRECQ: Li et al. 2021, arXiv 2102.05426). Each number has a position between levels, and gradients pass its
rounding as if nothing were rounded (Bengio et al. 2013, arXiv 1308.3432), as in SignRound (Cheng et al. 2023,
arXiv 2309.05516), but under Adam; scales have a factor each. A position begins at the unrounded weight, or at
the nearest place to it that is still rounded to the current solution. The best state is kept, as measured on
sequences that nothing is learned from, so that the result is never worse on these sequences than the state
that the learning began with.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ....layouts.formats.weight_format import Weight
from ...model_loader.hidden_states import HiddenStates
from ...model_loader.layer_stream import LayerStream
from ...model_loader.weight_places import Places, serve
from .equalization import EqualizedNorm
from .levels import Levels

POSITION_RATE, FACTOR_RATE = 2e-3, 2e-4
"""Adam's initial learning rates for positions, in levels, and for factors of scales; both decay to 0 along a
cosine."""
BETAS, SMALLEST = (0.9, 0.99), 1e-20
NEAREST = 0.49
"""How far from its own level a position may begin, as a share of the distance between levels."""
HELD_ASIDE = 16
"""One in this many parts of the text is held out: nothing is learned from it."""
LOOKS = 8
"""How many times the loss on the held-out part is computed."""
SEED = 26


@dataclass(frozen=True)
class LearnedLayer:
    """weights: the layer's weights by module
    before, after: the layer's squared error on held-out sequences, as a share of its output's square"""

    weights: dict[str, Weight]
    before: float
    after: float


def learn_rounding(
    stream: LayerStream,
    name: str,
    places: Places,
    found: Mapping[str, Weight],
    equalized: Mapping[str, EqualizedNorm],
    levels_of: Callable[[str, Weight], tuple[Levels, Tensor]],
    aim: HiddenStates,
    steps: int,
) -> LearnedLayer | None:
    """Find better weights for layer `name` than the weights `found`, by module; None if the text is too
    short.

    equalized: norms that belong to those weights
    levels_of: a weight's levels, on the stream's device, and the values fp32 [N, K] that it was rounded from
    aim:       the unquantized model's states after the layer, which the output should match
    """
    starts = list(stream.starts())
    held = starts[::-HELD_ASIDE]
    read = [start for start in starts if start not in held]
    if not read:
        return None
    with serve(stream, found, places):
        stream.place(name)
    for tensor, norm in equalized.items():
        stream.put(tensor, norm.weight)
    parts = [
        _LearnedWeight(module, parameter, *levels_of(module, found[module]))
        for module, parameter in _parameters(stream, name, places, found)
    ]
    layer = _Layer(stream, name, parts, aim)
    with _repeatable():
        before = best = layer.loss(held)
        kept = [part.state() for part in parts]
        optimizer = torch.optim.Adam(
            [
                {"params": [part.positions for part in parts], "rate": POSITION_RATE},
                {"params": [part.factors for part in parts], "rate": FACTOR_RATE},
            ],
            betas=BETAS,
            eps=SMALLEST,
            fused=stream.device.type == "cuda" or None,
        )
        for step, start in zip(range(1, steps + 1), _shuffled(read), strict=False):
            for group in optimizer.param_groups:
                group["lr"] = group["rate"] * (1 + math.cos(math.pi * (step - 1) / steps)) / 2
            layer.differentiate(start)
            optimizer.step()
            for part in parts:
                part.put()
            if step == steps or step % max(1, steps // LOOKS) == 0:
                loss = layer.loss(held)
                if loss < best:
                    best, kept = loss, [part.state() for part in parts]
    stream.drop(name)
    weights = {
        part.module: part.levels.weight(*state).to("cpu") for part, state in zip(parts, kept, strict=True)
    }
    return LearnedLayer(weights, before, best)


class _LearnedWeight:
    """A weight whose rounding is learned: its place in the model, its numbers' positions between levels."""

    def __init__(self, module: str, place: "_Place", levels: Levels, values: Tensor):
        self.module, self.place, self.levels = module, place, levels
        chosen = levels.chosen
        ideal = levels.positions(values)
        self.positions = torch.minimum(torch.maximum(ideal, chosen - NEAREST), chosen + NEAREST)
        self.factors = torch.ones(len(chosen), levels.groups, device=chosen.device)
        self._least = (chosen - 1).clamp(min=0).to(torch.uint8)
        self._most = (chosen + 1).clamp(max=levels.top).to(torch.uint8)
        self._values: Tensor | None = None

    def state(self) -> tuple[Tensor, Tensor]:
        """Return the levels [N, K] that the positions are nearest to, and the factors [N, groups]; copies."""
        return self.positions.round(), self.factors.clone()

    def take_gradient(self) -> None:
        """Set the gradients of the positions and the factors from the weight's gradient."""
        gradient = self.place.gradient
        self.positions.grad = gradient
        values = self._now() if self._values is None else self._values
        self.factors.grad = (gradient * values).unflatten(1, (self.levels.groups, -1)).sum(-1)

    def put(self) -> None:
        """Put the weight into the model; no number moves beyond the next level."""
        torch.clamp(self.positions, self._least, self._most, out=self.positions)
        values = self._now()
        # Kept for the next gradient where time counts more than memory.
        self._values = values if values.is_cuda else None
        self.place.put(values)

    def _now(self) -> Tensor:
        return self.levels.values(self.positions.round(), self.factors)


@dataclass(frozen=True)
class _Place:
    """Rows of a parameter, or of one expert's slice of it."""

    parameter: nn.Parameter
    expert: int | None
    rows: slice

    def of(self, whole: Tensor) -> Tensor:
        return (whole if self.expert is None else whole[self.expert])[self.rows]

    @property
    def gradient(self) -> Tensor:
        if self.parameter.grad is None:
            return torch.zeros_like(self.of(self.parameter.data), dtype=torch.float32)
        return self.of(self.parameter.grad).float()

    def put(self, values: Tensor) -> None:
        self.of(self.parameter.data).copy_(values)


@dataclass(frozen=True)
class _Layer:
    stream: LayerStream
    name: str
    parts: Sequence[_LearnedWeight]
    aim: HiddenStates

    def loss(self, starts: Sequence[int]) -> float:
        return sum(float(self._loss(start)) for start in starts) / len(starts)

    def differentiate(self, start: int) -> None:
        """Give each part its gradient on the sequences from `start` on."""
        parameters = {id(part.place.parameter): part.place.parameter for part in self.parts}.values()
        for parameter in parameters:
            parameter.requires_grad_(True)
        with torch.enable_grad():
            self._loss(start).backward()
        for part in self.parts:
            part.take_gradient()
        for parameter in parameters:
            parameter.requires_grad_(False)
            parameter.grad = None

    def _loss(self, start: int) -> Tensor:
        """Return the loss. Each token has the same weight, as after the next norm, because a few tokens have
        far larger outputs.
        """
        aim = self.stream.hidden(start, self.aim).float()
        error = (self.stream.run(self.name, start).float() - aim).square().sum(-1)
        return (error / aim.square().sum(-1).clamp(min=torch.finfo(torch.float32).tiny)).mean()


def _parameters(
    stream: LayerStream, name: str, places: Places, found: Mapping[str, Weight]
) -> Iterator[tuple[str, _Place]]:
    """Yield the weights that lie in the layer's parameters as they were found, one below the other.

    Weights that do not, such as transposed ones, stay as they were found.
    """
    for (target, expert), linears in places.by_slot.items():
        if not target.startswith(f"{name}.") or any(linear.module not in found for linear in linears):
            continue
        parameter = stream.model.get_parameter(target)
        first = 0
        for linear in linears:
            place = _Place(parameter, expert, slice(first, first + linear.n))
            expected = found[linear.module].to(stream.device).dequantize(stream.model.dtype)
            if torch.equal(place.of(parameter.data), expected):
                yield linear.module, place
            first += linear.n


def _shuffled(starts: Sequence[int]) -> Iterator[int]:
    """Yield all starts in one random order after another, without an end; the same number gives the same
    orders.
    """
    generator = torch.Generator().manual_seed(SEED)
    while True:
        for index in torch.randperm(len(starts), generator=generator).tolist():
            yield starts[index]


@contextmanager
def _repeatable() -> Iterator[None]:
    """Inside the `with` block, a GPU adds gradients in a fixed order, so that a resumed job learns the
    same."""
    deterministic: Any = torch.utils.deterministic
    before, filled = torch.are_deterministic_algorithms_enabled(), deterministic.fill_uninitialized_memory
    # Whatever is made here is written before it is read: to fill all of it first is a pass over each tensor.
    deterministic.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*determinis")
            yield
    finally:
        torch.use_deterministic_algorithms(before)
        deterministic.fill_uninitialized_memory = filled
