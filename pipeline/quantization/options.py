"""The options of `quantize` beside a model, a recipe and a folder; `release` has the first of the two
classes.

The options are plain data; `job.py` and `budget/` use them.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from ...base.option_fields import check_options, option

DEFAULT_RECIPE = "int4-symmetric"
"""Every reader that a card names loads it: transformers from 5.23 on loads no zero points."""


# The registry brings torch along, which takes seconds: it is imported when a choice is looked at.
def _exports() -> Iterable[str]:
    from ..conventions.all_conventions import EXPORTS

    return EXPORTS


@dataclass(frozen=True)
class QuantizeOptions:
    """The options of `quantize`; a value that is not allowed raises UserError."""

    revision: str | None = option(None, "Branch, tag or commit of MODEL, if it is a Hub id.", metavar="REV")
    export: str | None = option(
        None,
        "The convention to write.",
        choices=_exports,
        unless_given="compressed-tensors; scalegate for formats that no other convention stores",
    )
    calibration: str | None = option(
        None,
        "Text to calibrate on: a file (plain, or .jsonl with a `text` on each line), hub:OWNER/NAME, or self "
        "for text that the model itself writes.",
        metavar="TEXT",
        unless_given="the recipe's",
    )
    overwrite: bool = option(False, "Start over if the folder holds another job or an older job.")

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True)
class BudgetOptions:
    """A limit on the artifact's size, or on its divergence from the source. With either limit, formats are
    chosen by layer.
    """

    target_bits: float | None = option(
        None, "Mix INT4 and INT8 per layer to average BITS per weight.", metavar="BITS", above=0
    )
    max_kl: float | None = option(
        None,
        "Mix INT4 and INT8 per layer to use the fewest bits at a KL divergence from MODEL of at most NATS.",
        metavar="NATS",
        above=0,
    )

    def __post_init__(self) -> None:
        check_options(self)
