"""The calibration data that a job's quantizers need, by module."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ....base.errors import UserError
from ....layouts.formats.weight_format import WeightFormat
from ...model_loader.linear_weights import EMBEDDING
from ...records.recipe import Recipe
from ...records.recipe_fields import AWQ, AWQ_GPTQ, DATA_FREE, GPTQ
from ..quantizers.all_quantizers import QUANTIZERS
from ..quantizers.quantizer import (
    CalibratingQuantizer,
    CorrectingQuantizer,
    SharingQuantizer,
    WeighingQuantizer,
)
from ..shards.tasks import WeightTask


@dataclass(frozen=True)
class CalibrationNeeds:
    """The data that the pass over a text has to find, by module; false if there is none to find."""

    largest: frozenset[str] = frozenset()
    """Modules whose inputs' largest magnitude is needed."""
    squares: frozenset[str] = frozenset()
    """Modules for which the sum of squares of each input is needed."""
    solved: Mapping[str, WeightTask] = field(default_factory=dict)
    """Modules whose weights are rounded on the text (GPTQ, AWQ), with their tasks."""
    corrects: bool = True
    """Whether later columns compensate a column's rounding error (GPTQ, `second_order.py`)."""
    equalizes: bool = False
    """Whether columns are scaled and norms absorb the scales (AWQ, `equalization.py`)."""
    learning_steps: int = 0
    """Number of steps for which each layer's rounding is learned afterwards (`learned_rounding.py`)."""

    def solves(self, modules: Iterable[str]) -> bool:
        return any(module in self.solved for module in modules)

    def __bool__(self) -> bool:
        return bool(self.largest or self.squares or self.solved)


def calibration_needs(recipe: Recipe, tasks: Sequence[WeightTask]) -> CalibrationNeeds:
    """Return the calibration data that the quantizers of `tasks` need. Raise UserError if a format does not
    have the recipe's method.
    """
    largest, squares, solved = set(), set(), {}
    if recipe.learned_rounding and recipe.method == DATA_FREE:
        raise UserError(
            f"the recipe {recipe.name!r} has `learned_rounding`, which starts from weights that a method has "
            "rounded on a text; give it `method: gptq`"
        )
    # A large model has tens of thousands of tasks and a few specs.
    specs = {task.spec for task in tasks if task.is_quantized}
    rounding_inputs = {spec for spec in specs if calibrator(spec) is not None}
    weighing = {spec for spec in specs if isinstance(QUANTIZERS[spec.name], WeighingQuantizer)}
    for task in tasks:
        if task.linear is None or not task.is_quantized or task.linear.role == EMBEDDING:
            continue
        module = task.linear.module
        if task.spec in rounding_inputs:
            largest.add(module)
        if recipe.method != DATA_FREE:
            _require_method(recipe.method, module, task.spec, task.linear.k)
            solved[module] = task
        elif task.spec in weighing:
            squares.add(module)
    return CalibrationNeeds(
        frozenset(largest),
        frozenset(squares),
        solved,
        corrects=recipe.method in (GPTQ, AWQ_GPTQ),
        equalizes=recipe.method in (AWQ, AWQ_GPTQ),
        learning_steps=recipe.learned_rounding,
    )


def _require_method(method: str, module: str, spec: WeightFormat, k: int) -> None:
    """Raise UserError if a weight of `spec` with `k` columns cannot be rounded by `method`."""
    quantizer = QUANTIZERS[spec.name]
    # Tensors that weights share are found before any of them is scaled.
    shares = method != GPTQ and isinstance(quantizer, SharingQuantizer)
    if shares or not isinstance(quantizer, CorrectingQuantizer):
        advice = "use `method: gptq`" if shares else "leave `method` out of the recipe"
        raise UserError(f"{module}: {spec.label} has no method {method!r}; {advice}")
    try:
        together = quantizer.columns_together(spec)
    except ValueError as error:
        raise UserError(f"{module}: {error}; leave `method` out of the recipe") from error
    if k % together:
        raise UserError(
            f"{module}: {method} rounds {together} columns together, and K = {k} is no multiple of that; "
            "add a rule with `format: unquantized` for this layer, or leave `method` out of the recipe"
        )


def calibrator(spec: WeightFormat) -> CalibratingQuantizer | None:
    """Return the quantizer of `spec` if that format rounds inputs as well."""
    quantizer = QUANTIZERS[spec.name]
    if isinstance(quantizer, CalibratingQuantizer) and quantizer.calibrates(spec):
        return quantizer
    return None
