"""What a job's quantizers want of a text: which modules, and where the text comes from if none was named."""

from collections.abc import Sequence

from ....base.errors import UserError
from ....layouts.formats.input_format import InputFormat
from ....layouts.formats.weight_format import WeightFormat
from ....layouts.kv.format import KV_FORMATS, largest_of
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
from .calibration_names import SELF
from .wanted_of_text import Found, Wanted


def text_source(recipe: Recipe, wanted: Wanted, for_kv_scales: bool, given: str | None) -> str | None:
    """Which text is read: the one `given`, the recipe's, or what the model draws where there has to be one.

    None where nothing heeds a text, or what does can do without.
    for_kv_scales: keys and values heed one
    """
    named = given or recipe.calibration or None
    if not wanted and not for_kv_scales:
        return None
    return named or (SELF if wanted.largest or wanted.solved else None)


def budget_source(recipe: Recipe, given: str | None) -> str:
    """Which text the formats are chosen on, where there is a budget."""
    return given or recipe.calibration or SELF


def said_of_kv(kv_format: str, text: str | None) -> str:
    """For people: the KV format, and what its scales were found on where it takes some.

    text: the name of the one that is read; None where none is
    """
    if largest_of(KV_FORMATS[kv_format]) is None:
        return kv_format
    if text is None:
        return f"{kv_format}, unscaled; give --calibration TEXT or self"
    return f"{kv_format}, with scales found on {'what the model writes itself' if text == SELF else text}"


def what_is_wanted(recipe: Recipe, tasks: Sequence[WeightTask]) -> Wanted:
    """What the quantizers of `tasks` want. UserError where the recipe's method is not one of a format's."""
    largest, squares, solved = set(), set(), {}
    if recipe.learned_rounding and recipe.method == DATA_FREE:
        raise UserError(
            f"the recipe {recipe.name!r} has `learned_rounding`, which goes on from what a method found on a "
            "text; give it `method: gptq`"
        )
    for task in tasks:
        if task.linear is None or not task.is_quantized:
            continue
        if task.linear.role == EMBEDDING:
            continue
        module, quantizer = task.linear.module, QUANTIZERS[task.spec.name]
        if calibrator(task.spec) is not None:
            largest.add(module)
        if recipe.method != DATA_FREE:
            # Tensors that weights share are found before any of them is scaled.
            shares = recipe.method != GPTQ and isinstance(quantizer, SharingQuantizer)
            if shares or not isinstance(quantizer, CorrectingQuantizer):
                raise UserError(
                    f"{module}: {task.spec.label} has no method {recipe.method!r}; "
                    + ("`gptq` it has" if shares else "leave `method` out of the recipe")
                )
            try:
                quantizer.columns_together(task.spec)
            except ValueError as error:
                raise UserError(f"{module}: {error}; leave `method` out of the recipe") from error
            solved[module] = task
        elif isinstance(quantizer, WeighingQuantizer):
            squares.add(module)
    return Wanted(
        frozenset(largest),
        frozenset(squares),
        solved,
        corrects=recipe.method in (GPTQ, AWQ_GPTQ),
        equalizes=recipe.method in (AWQ, AWQ_GPTQ),
        learning_steps=recipe.learned_rounding,
    )


def input_formats(tasks: Sequence[WeightTask], found: Found) -> dict[str, InputFormat]:
    """How the input of each module is rounded; empty where no spec rounds inputs."""
    formats: dict[str, InputFormat] = {}
    for task in tasks:
        quantizer = calibrator(task.spec) if task.is_quantized else None
        if task.linear is not None and quantizer is not None:
            formats[task.linear.module] = quantizer.input_format(task.spec, found.largest[task.linear.module])
    return formats


def calibrator(spec: WeightFormat) -> CalibratingQuantizer | None:
    """The quantizer of `spec`, where that rounds inputs."""
    quantizer = QUANTIZERS[spec.name]
    if isinstance(quantizer, CalibratingQuantizer) and quantizer.calibrates(spec):
        return quantizer
    return None
