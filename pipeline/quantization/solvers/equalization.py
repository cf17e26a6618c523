"""Equalization (AWQ: Lin et al. 2023, arXiv 2306.00978): large inputs get finer weights.

The columns of a group share a scale, so rounding errors are about equal on all columns of the group, and
matter most where inputs are large. Column k of the weights that read a norm's output is multiplied by s[k],
and the norm's own weight divided by s[k]: before rounding the model computes the same. Here s is a power of
the inputs' root mean square, with the exponent for which the outputs of the rounded weights have the least
error. Inputs that do not come from a norm are left alone, and so are inputs that an unquantized module, such
as a router, reads as well.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

EXPONENTS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7)
LEAST_INPUT = 1e-3
"""The least root mean square of an input, as a share of the largest, which limits how far inputs are scaled
up."""
TOLERANCE = 0.02
"""Largest relative change of a layer's update once scales are folded in: the rounding error of bf16."""

Round = Callable[[Tensor], Tensor]
"""Rounds a weight, fp32 [N, K], to the nearest values of a format."""


@dataclass(frozen=True)
class EqualizedNorm:
    """A norm's weight [K], divided by the scales that `modules` have in their columns."""

    weight: Tensor
    modules: tuple[str, ...]


class NormOutputs:
    """Inside the `with` block, records the last outputs of a layer's norms, to find the norm that made a
    tensor.

    A norm is a module whose one parameter is a `weight` of one dimension.
    """

    def __init__(self, layer: nn.Module):
        self._outputs: dict[str, Tensor] = {}
        self._hooks = [
            module.register_forward_hook(self._remember(name))
            for name, module in layer.named_modules()
            if [(leaf, weight.dim()) for leaf, weight in module._parameters.items() if weight is not None]
            == [("weight", 1)]
        ]

    def __enter__(self) -> "NormOutputs":
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def norm_of(self, x: Tensor) -> str | None:
        """Return the norm within the layer whose output `x` is; `x` is kept, so no other tensor has its
        address.
        """
        return next(
            (
                name
                for name, output in self._outputs.items()
                if output.data_ptr() == x.data_ptr() and output.shape == x.shape
            ),
            None,
        )

    def _remember(self, name: str) -> Callable[[nn.Module, tuple, Tensor], None]:
        def remember(_: nn.Module, __: tuple, output: Tensor) -> None:
            self._outputs[name] = output

        return remember


def scaled_norm(
    norm: Tensor, hessian: Tensor, weights: Sequence[Tensor], rounds: Sequence[Round]
) -> Tensor | None:
    """Return the norm's weight [K] divided by the best scales, in its own dtype; None if no scales lower the
    error.

    hessian: fp32 [K, K], the sum of x xᵀ over the norm's outputs
    weights: the weights that read these outputs, fp32 [N, K] each
    rounds:  how each is rounded
    """
    size = hessian.diagonal().clamp(min=0).sqrt()
    if not size.max() > 0:
        return None
    size = size.clamp(min=LEAST_INPUT * float(size.max()))

    def loss(columns: Tensor) -> float:
        return sum(
            energy(one_round(weight * columns) / columns - weight, hessian)
            for weight, one_round in zip(weights, rounds, strict=True)
        )

    least, best = loss(torch.ones_like(size)), None
    for exponent in EXPONENTS:
        scale = size**exponent
        divided = (norm.float() / (scale / (scale.max() * scale.min()).sqrt())).to(norm.dtype)
        found = loss(column_scales(norm, divided))
        if found < least:
            least, best = found, divided
    return best


def column_scales(norm: Tensor, divided: Tensor) -> Tensor:
    """Return the scales of the columns, fp32 [K], if a norm's weight [K] becomes `divided`, rounding
    included.
    """
    old, new = norm.float(), divided.float()
    return torch.where(new == 0, 1.0, old / torch.where(new == 0, 1.0, new))


def energy(rows: Tensor, hessian: Tensor) -> float:
    """Return the sum over rows r [N, K] of r H rᵀ."""
    return float(((rows @ hessian) * rows).sum(dtype=torch.float64))
