"""Where the servers of a validation run, and what else their commands are told.

What an engine serves with is `engine/options.py`. How much of a GPU each server may take is worked out by
those who start them.
"""

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, fields

from ...layouts.errors import UserError
from ..options import OptionValue, check, option

VISIBLE = "CUDA_VISIBLE_DEVICES"
BASELINE = "baseline"


@dataclass(frozen=True)
class Placement:
    """GPUs and further words for the servers' commands. UserError where a value is none that it can have."""

    devices: tuple[int, ...] | None = option(
        None, "GPUs by number: with enough of them, each server gets its own.", minimum=0
    )
    tensor_parallel_size: int = option(1, "GPUs that share every layer, on engines that can.", minimum=1)
    pipeline_parallel_size: int = option(
        1, "GPUs that hold one part of the layers each, on engines that can.", minimum=1
    )
    engine_args: str | None = option(
        None, "More words for the engine's own command, quoted as one, as a shell would read them."
    )
    baseline_engine_args: str | None = option(
        None, "The same for the baseline's server; default as --engine-args."
    )
    startup_timeout: int = option(1800, "Seconds that a server may take to start.", minimum=1)

    def __post_init__(self) -> None:
        for one in fields(self):
            object.__setattr__(self, one.name, check(type(self), one, getattr(self, one.name)))
        for side in ("artifact", BASELINE):
            self.words(side)

    @property
    def gpus(self) -> int:
        """That one server runs on."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    def words(self, side: str) -> list[str]:
        """What the command of that side's server is told besides."""
        text, given = self.engine_args, "--engine-args"
        if side == BASELINE and self.baseline_engine_args is not None:
            text, given = self.baseline_engine_args, "--baseline-engine-args"
        try:
            return shlex.split(text or "")
        except ValueError as error:
            raise UserError(f"{given} {text!r} cannot be read as a shell would: {error}") from error

    def groups(self, sides: int, first: int = 0) -> list[tuple[int, ...]]:
        """The GPUs of each of `sides` servers: a group each, or one group for all.

        first: the only GPU where none are named. UserError for a number of GPUs that is neither.
        """
        devices = self.devices or tuple(range(first, first + self.gpus))
        if len(devices) == self.gpus:
            return [devices] * sides
        if len(devices) == self.gpus * sides:
            return [devices[start : start + self.gpus] for start in range(0, len(devices), self.gpus)]
        raise UserError(
            f"--devices names {len(devices)} GPUs; a server runs on {self.gpus}, so give {self.gpus} for all "
            f"servers in common or {self.gpus * sides} for {sides} servers side by side"
        )

    def asked_for(self) -> dict[str, OptionValue]:
        """What differs from the defaults, by name."""
        return {one.name: value for one in fields(self) if (value := getattr(self, one.name)) != one.default}


ANYWHERE = Placement()
PLACEMENT = frozenset(one.name for one in fields(Placement))


def only_these(devices: Sequence[int]) -> dict[str, str]:
    """The environment of a process that sees these GPUs alone, by the numbers that this process knows."""
    visible = os.environ.get(VISIBLE)
    names = visible.split(",") if visible else None
    chosen = [names[one].strip() if names and one < len(names) else str(one) for one in devices]
    return {VISIBLE: ",".join(chosen)} if chosen else {}
