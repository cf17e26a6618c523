"""GPTQ with our grids in its loop, and descent after the loop: rounds a weight so that its output suffers
least.

The error of a row w is (ŵ - w) H (ŵ - w)ᵀ, where H = Σ x xᵀ over inputs of a text. Columns are rounded group
by group, and later columns compensate the error of each rounding (GPTQ: Frantar et al. 2022, arXiv
2210.17323, after Optimal Brain Surgeon). Three things are ours. A group's grid is chosen inside that loop by
the loop's own error: every candidate grid rounds the whole group with feedback, and each row takes the one
that costs it least. Groups that matter most come first, and within a group the columns that matter most,
which keeps the groups as they lie in the file. *Descent* follows: each group in turn is solved again with all
other groups fixed. Descent can only lower the error, since a group keeps its solution unless a better one is
found.

Rows do not depend on each other, so blocks of rows are solved side by side. The solver knows no particular
format: a `Grid` defines a format's numbers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Protocol

import torch
from torch import Tensor

from .column_sums import solve_rows
from .graph_replay import Choose, with_graph_replay

DAMPING = 0.01
"""The share of the mean of H's diagonal that is added to the diagonal, as in GPTQ."""
SWEEPS = 2
CPU_NUMBERS, GPU_NUMBERS = 1 << 19, 1 << 26
"""How many numbers [candidates, rows, group] are rounded together: enough that an operation outweighs its
call on a CPU, and enough to fill a GPU."""
LAZY = 16
"""How many columns pass their errors on to later columns at once (GPTQ's lazy updates, within a group)."""

Round = Callable[[Tensor, Tensor], object]


class Grid(Protocol):
    """The values that a format offers to one group of a row, for a choice of that group's parameters.

    Parameters are fp32 [P, ...], such as a scale and a zero point, as exact as the file will hold them.
    """

    @property
    def group_size(self) -> int: ...

    @property
    def candidates(self) -> int:
        """Return how many candidates `first` returns; `near` returns no more than that."""
        ...

    def __hash__(self) -> int:
        """Return a hash of the grid; grids that are equal do the same operations."""
        ...

    def first(self, target: Tensor, weight: Tensor) -> Tensor:
        """Return parameters worth trying [P, candidates, rows] for values [rows, g] whose squared errors
        count `weight` [g] times."""
        ...

    def near(self, parameters: Tensor) -> Tensor:
        """Return the parameters [P, candidates, rows] that are next to `parameters` [P, rows]."""
        ...

    def rescaled(self, parameters: Tensor, factor: Tensor) -> Tensor:
        """Return parameters [P, rows] under which the same codes are about `factor` [rows] times as large."""
        ...

    def rounder(self, parameters: Tensor) -> Round:
        """Return a function that writes the nearest values of the grid with parameters [P, n] to values [n]
        into a third tensor."""
        ...


@dataclass(frozen=True)
class Curvature:
    """H of a weight's inputs, made ready for any number of weights that have the same inputs.

    order:   int64 [K], the columns in the order in which they are solved
    matrix:  fp32 [K, K] in that order, damped
    inverse: fp32 [K, K] upper triangular R with R'R the inverse of `matrix`
    within:  fp32 [G, g, g], the same factor for each group's own block
    blocks:  fp32 [G, g, g], the inverses of those blocks
    """

    order: Tensor
    matrix: Tensor
    inverse: Tensor
    within: Tensor
    blocks: Tensor

    @property
    def group_size(self) -> int:
        return self.within.shape[-1]


def prepare(hessian: Tensor, group_size: int, damping: float = DAMPING) -> Curvature:
    """Return the curvature for `hessian`, float [K, K], symmetric and positive semidefinite; K a multiple of
    `group_size`."""
    diagonal = hessian.diagonal().double()
    mean = diagonal.mean()
    level = damping * (mean if mean > 0 else torch.ones_like(mean))
    groups = diagonal.view(-1, group_size)
    first = groups.sum(1).argsort(descending=True, stable=True)
    columns = groups.argsort(dim=1, descending=True, stable=True)
    order = (first[:, None] * group_size + columns[first]).flatten()
    matrix = hessian[order][:, order].float()
    matrix.diagonal().add_(level)
    own = torch.stack(
        [matrix[i : i + group_size, i : i + group_size] for i in range(0, len(order), group_size)]
    ).double()
    blocks = torch.cholesky_inverse(torch.linalg.cholesky(own))
    return Curvature(
        order,
        matrix,
        _upper(matrix.double()).float(),
        torch.linalg.cholesky(blocks, upper=True).float(),
        blocks.float(),
    )


def _upper(matrix: Tensor) -> Tensor:
    # One at a time: of a wide layer's inputs each of these takes gigabytes.
    matrix = torch.linalg.cholesky(matrix)
    matrix = torch.cholesky_inverse(matrix)
    return torch.linalg.cholesky(matrix, upper=True)


@dataclass(frozen=True)
class Solution:
    """A solution. values: fp32 [N, K], on the grid; parameters: fp32 [P, N, K/g]."""

    values: Tensor
    parameters: Tensor

    def distance_from(self, weight: Tensor) -> tuple[float, float]:
        """Return the squared error of `weight` [N, K], and its squared norm."""
        original = weight.float()
        error = (self.values - original).square().sum(1).sum(dtype=torch.float64)
        return float(error), float(original.square().sum(1).sum(dtype=torch.float64))


def solve(weight: Tensor, curvature: Curvature, grid: Grid) -> Solution:
    """Return values of `grid` for `weight` [N, K], any float dtype, on the curvature's device."""
    n, k = weight.shape
    g = grid.group_size
    values = torch.empty(n, k, dtype=torch.float32, device=weight.device)
    found: dict[int, Tensor] = {}
    first, again = _choices(grid)

    def solve_block(rows: slice) -> None:
        target = weight[rows].float()[:, curvature.order]
        rounded, chosen = _first_pass(target, curvature, grid.group_size, first)
        pull = (rounded - target) @ curvature.matrix
        for _ in range(SWEEPS):
            _descend(rounded, chosen, pull, curvature, again)
        values[rows] = torch.empty_like(rounded).index_copy_(1, curvature.order, rounded)
        places = curvature.order[::g] // g
        found[rows.start] = torch.empty_like(chosen).index_copy_(2, places, chosen)

    chunks = (CPU_NUMBERS, GPU_NUMBERS)
    solve_rows(solve_block, n, g * 2 * grid.candidates, weight.device, chunks)
    return Solution(values, torch.cat([found[start] for start in sorted(found)], 1))


@lru_cache(maxsize=1)
def _choices(grid: Grid) -> tuple[Choose, Choose]:
    """Return the recorded functions that choose parameters, shared by all weights whose grids are equal."""
    return with_graph_replay(partial(_first_choice, grid)), with_graph_replay(partial(_next_choice, grid))


def forget_recordings() -> None:
    """Free the recordings on a GPU, about a gigabyte for wide layers."""
    _choices.cache_clear()


def _first_pass(target: Tensor, curvature: Curvature, g: int, choose: Choose) -> tuple[Tensor, Tensor]:
    """Run GPTQ, with grids chosen on the way: values [rows, K] and parameters [P, rows, G], in solving
    order.
    """
    wanted = target.clone()
    rounded = torch.empty_like(target)
    chosen = []
    for start in range(0, target.shape[1], g):
        group, later = slice(start, start + g), slice(start + g, None)
        factor = curvature.inverse[group, group]
        values, parameters, _ = choose(wanted[:, group], factor)
        error = torch.linalg.solve_triangular(factor, wanted[:, group] - values, upper=True, left=False)
        wanted[:, later] -= error @ curvature.inverse[group, later]
        rounded[:, group] = values
        chosen.append(parameters)
    return rounded, torch.stack(chosen, 2)


def _descend(rounded: Tensor, chosen: Tensor, pull: Tensor, curvature: Curvature, choose: Choose) -> None:
    """Solve each group again in place, with the other groups as they are. pull: (rounded - target) H, kept
    up.
    """
    g = curvature.group_size
    for index in range(chosen.shape[2]):
        group = slice(index * g, index * g + g)
        now, parameters = rounded[:, group].clone(), chosen[:, :, index]
        wanted = now - pull[:, group] @ curvature.blocks[index]
        metric = curvature.matrix[group, group]
        codes = now @ metric
        # The same codes under the scale that suits them best.
        factor = (codes * wanted).sum(1) / (codes * now).sum(1).clamp(min=torch.finfo(torch.float32).tiny)
        within = curvature.within[index]
        values, found, cost = choose(wanted, parameters, factor, metric.diagonal(), within)
        before = torch.linalg.solve_triangular(within, wanted - now, upper=True, left=False).square().sum(1)
        better = cost < before
        values = torch.where(better[:, None], values, now)
        chosen[:, :, index] = torch.where(better, found, parameters)
        rounded[:, group] = values
        pull += (values - now) @ curvature.matrix[group]


def _first_choice(grid: Grid, wanted: Tensor, factor: Tensor) -> tuple[Tensor, ...]:
    """Return the best choice among the grid's first candidates."""
    return _best(wanted, factor, grid, grid.first(wanted, factor.diagonal().square().reciprocal()))


def _next_choice(
    grid: Grid, wanted: Tensor, parameters: Tensor, rescaling: Tensor, weight: Tensor, factor: Tensor
) -> tuple[Tensor, ...]:
    """Return the best choice among the neighbours of `parameters` [P, rows], the neighbours of `parameters`
    scaled by `rescaling` [rows], and the first candidates."""
    tried = [
        *grid.near(parameters).unbind(1),
        *grid.first(wanted, weight).unbind(1),
        grid.rescaled(parameters, torch.where(rescaling > 0, rescaling, 1.0)),
    ]
    return _best(wanted, factor, grid, torch.stack(tried, dim=1))


def _best(target: Tensor, factor: Tensor, grid: Grid, tried: Tensor) -> tuple[Tensor, ...]:
    """Return, for each row, the best of the parameters [P, C, rows]: rounded values [rows, g], parameters,
    cost [rows].

    factor: upper triangular [g, g], of the inverse of the metric
    """
    rows, g = target.shape
    count = tried.shape[1]
    parameters = tried.reshape(tried.shape[0], -1)
    wanted = target.T.repeat(1, count)
    rounded = torch.empty_like(wanted)
    errors = torch.empty_like(wanted[:LAZY])
    cost = torch.zeros_like(wanted[0])
    scales = factor.diagonal().reciprocal()
    round_into = grid.rounder(parameters)
    for start in range(0, g, LAZY):
        stop = min(start + LAZY, g)
        for column in range(start, stop):
            round_into(wanted[column], rounded[column])
            error = torch.sub(wanted[column], rounded[column], out=errors[column - start])
            error.mul_(scales[column])
            cost.addcmul_(error, error)
            wanted[column + 1 : stop].addr_(factor[column, column + 1 : stop], error, alpha=-1)
        wanted[stop:].addmm_(factor[start:stop, stop:].T, errors[: stop - start], alpha=-1)
    least = cost.view(count, rows).min(0)
    picked = least.indices * rows + torch.arange(rows, device=target.device)
    return rounded[:, picked].T, parameters[:, picked], least.values
