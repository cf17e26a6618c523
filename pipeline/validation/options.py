"""The options of `validate` beside the workload, the bounds and the engine's options; `release` has the same.

The options are plain data, which also builds the workload and the bounds. `run.py` applies the options to a
run.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...base.errors import UserError
from ...base.option_fields import check_options, given_of, option
from ...serving_check.adapters.all_engines import DEFAULT_ENGINE, ENGINES, engine_named, find_engine
from ...serving_check.settings import (
    QUALITY_TOKENS,
    Bounds,
    WorkloadSettings,
    default_ms,
)

TRANSFORMERS, NO_OTHER_READER = "transformers", "none"
"""Further readers with which an artifact can be loaded, besides other projects' engines."""


def _engines() -> Iterable[str]:
    return ENGINES


def _other_readers() -> Iterable[str]:
    return (TRANSFORMERS, NO_OTHER_READER, *(name for name in ENGINES if name != DEFAULT_ENGINE))


def _require_reader(reader: str) -> None:
    """Raise UserError if the reader is unknown, or not installed."""
    if reader in (TRANSFORMERS, NO_OTHER_READER):
        return
    engine = find_engine(reader)
    if engine is None or engine.name == DEFAULT_ENGINE:
        raise UserError(f"unknown also_load {reader!r}; choose one of: {', '.join(_other_readers())}")
    found = engine.availability()
    if not found.available:
        install = "" if found.install is None else f": {found.install.partition(', for --engine')[0]}"
        raise UserError(f"--also-load {reader}: {found.detail}{install}")


@dataclass(frozen=True)
class ValidateOptions:
    """The options of `validate`; a value that is not allowed raises UserError."""

    baseline: str | None = option(
        None,
        "The checkpoint to compare with: a folder or a Hub id.",
        metavar="MODEL",
        unless_given="what was quantized",
    )
    baseline_revision: str | None = option(
        None, "Branch, tag or commit of the baseline, if it is a Hub id.", metavar="REV"
    )
    engine: str = option(
        DEFAULT_ENGINE,
        "The engine that serves the models, or the URL of a running server.",
        suggestions=_engines,
    )
    baseline_engine: str | None = option(
        None,
        "The engine that serves the baseline, or the URL of a running server.",
        suggestions=_engines,
        unless_given="as --engine",
    )
    text: Path | None = option(  # noqa: RUF009
        None,
        "Held-out text to measure in addition to Scalegate's own: plain, or .jsonl with a `text` on each "
        "line.",
        metavar="FILE",
    )
    quality_tokens: int = option(
        QUALITY_TOKENS, "Held-out tokens of each text to measure quality on.", minimum=1024
    )
    also_load: str = option(
        TRANSFORMERS,
        "Another engine, or the URL of its server, that must load the artifact and predict 256 tokens as "
        "Scalegate does.",
        suggestions=_other_readers,
    )
    rival: str | None = option(
        None,
        "A checkpoint that the artifact must be faster than; `release` also accepts a recipe to make the "
        "checkpoint with.",
        metavar="MODEL",
        unless_given="the rival that the recipe names, if any",
    )
    rival_revision: str | None = option(
        None, "Branch, tag or commit of the rival, if it is a Hub id.", metavar="REV"
    )
    tasks: str | None = option(
        None,
        "Tasks or task files of lm-eval, separated by commas; the verdict records both servers' scores.",
        formerly="eval",
        metavar="TASK,TASK,...",
    )
    sign: Path | None = option(  # noqa: RUF009
        None,
        "An SSH key to sign the verdict with; the signature is written beside the verdict.",
        metavar="KEY",
    )

    def __post_init__(self) -> None:
        check_options(self)
        _require_reader(self.also_load)

    @property
    def engine_of_baseline(self) -> str:
        """Return the engine of the baseline: as given, or else the artifact's, or our own if the artifact's
        is a running server."""
        return self.baseline_engine or (self.engine if engine_named(self.engine).starts else DEFAULT_ENGINE)


def asked_workload(
    given: Mapping[str, Any], input_len: int, seed: int, profile: str | None = None
) -> WorkloadSettings:
    """Return the workload from the given options, with defaults that depend on the prompts' length. Ms
    between the given ones are drawn; exploratory runs turn this off.

    input_len, seed, profile: the values to use unless they are given
    """
    values: dict[str, Any] = {"input_len": input_len, "seed": seed, "profile": profile}
    values |= given_of(WorkloadSettings, given)
    values = {"ms": default_ms(values["input_len"])} | values
    return WorkloadSettings(**values, draws_between=True)


def asked_bounds(recipe: Mapping[str, Any], given: Mapping[str, Any]) -> Bounds:
    """Return the recipe's bounds, replaced by the bounds that were given."""
    return replace(Bounds.from_recipe(recipe), **given_of(Bounds, given))
