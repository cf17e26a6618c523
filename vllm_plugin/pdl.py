"""Programmatic dependent launch (PDL) in the graphs that vLLM compiles around our products.

Our products load weights before the kernel ahead of them has ended, but only if that kernel lets them start.
Inductor's kernels, such as norms and activations, do so if they are compiled with PDL.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from ..kernels import inductor_pdl
from . import cache_key
from .interface import CompilerOptions, logger


@contextmanager
def with_pdl(options: CompilerOptions) -> Iterator[CompilerOptions]:
    """Return Inductor's options with PDL if it was measured with what this process serves; kernels compiled
    within the block wait for their predecessor before they touch memory.

    An option that the user has set stays, so `triton.enable_pdl` turns PDL off.
    """
    if not is_measured():
        yield options
        return
    with inductor_pdl.waiting_first():
        chosen = {**inductor_pdl.options(), **options}
        log_pdl(bool(chosen.get("triton.enable_pdl")))
        yield chosen


def is_measured() -> bool:
    """Say whether this process serves linear layers or experts, and no keys and values."""
    served = cache_key.SERVED
    return bool(served) and not any(kind.startswith(cache_key.KEYS_AND_VALUES) for kind in served)


@cache
def log_pdl(is_used: bool) -> None:
    logger.info(
        "scalegate-kernels has vLLM's graphs compiled %s programmatic dependent launch",
        "with" if is_used else "without",
    )
