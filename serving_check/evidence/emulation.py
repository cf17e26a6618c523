"""Which servers emulate the format of their inputs: such a server has the format's quality, not its speed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..adapters.prometheus_text import labelled
from ..adapters.series import SCALEGATE_SERIES, Series
from ..settings import DOCUMENTED


@dataclass(frozen=True)
class EmulatedProducts:
    """Products of one side's server whose inputs are rounded to a format and multiplied in 16 or 32 bits."""

    __pydantic_config__ = DOCUMENTED

    side: str
    """`artifact`, `baseline` or `rival`."""
    inputs: str
    """The format: `FP8`."""
    hardware: str
    """What multiplies that format."""
    products: int


def emulated_products(
    side: str, samples: Mapping[str, float], series: Series = SCALEGATE_SERIES
) -> tuple[EmulatedProducts, ...]:
    """Return what a server's `/metrics` say; empty if it emulates nothing, or is an engine that does not
    tell.
    """
    return tuple(
        EmulatedProducts(side, labels["inputs"], labels["hardware"], int(count))
        for labels, count in labelled(samples, series.emulated_products)
        if count
    )


def is_speed_real(emulated: Sequence[EmulatedProducts]) -> bool:
    """Say whether the artifact's speed beside the baseline's is that of the formats; a rival does not
    count.
    """
    return all(products.side == "rival" for products in emulated)


def in_words(emulated: Sequence[EmulatedProducts]) -> str:
    """Return a text like `28 products of the artifact emulate FP8 inputs`"""
    return " and ".join(
        f"{each.products} products of the {each.side} emulate {each.inputs} inputs" for each in emulated
    )


def why_not_judged(emulated: Sequence[EmulatedProducts]) -> str | None:
    """Return why speed, or the comparison with the rival, was not judged, and where it can be; None if it
    was.
    """
    if not emulated:
        return None
    hardware = " and ".join(dict.fromkeys(each.hardware for each in emulated))
    return (
        f"here {in_words(emulated)}, which are rounded to that format and multiplied in 16 or 32 bits. This "
        f"gives the format's quality, not its speed. Validate again on {hardware}, with `--engine vllm` if "
        "Scalegate emulates it there as well"
    )
