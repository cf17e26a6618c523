"""The placement of a validation's servers, and further words of their commands.

`engine/options.py` has the options of serving. The caller that starts servers computes their shares of a GPU.
"""

import itertools
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from ...base.errors import UserError
from ...base.option_fields import OptionValue, check_options, option

VISIBLE = "CUDA_VISIBLE_DEVICES"
OWN_OPTIONS = {
    word: f"--{name}-parallel-size"
    for name, short in (("tensor", "-tp"), ("pipeline", "-pp"))
    for word in (f"--{name}-parallel-size", short)
}
"""Options that must not be among an engine's own words, since our options plan memory and GPUs."""
BACKEND, RAY = "--distributed-executor-backend", "ray"
BASELINE = "baseline"


def gpus_here() -> int:
    """Return the number of GPUs that this process sees."""
    import torch

    return torch.cuda.device_count()


@dataclass(frozen=True)
class Placement:
    """The servers' GPUs and further words of their commands. Raise UserError if a value is not allowed."""

    devices: tuple[int, ...] | None = option(
        None,
        "GPUs by number, or all; with enough GPUs, each server gets GPUs of its own.",
        minimum=0,
        count=gpus_here,
    )
    tensor_parallel_size: int = option(
        1, "GPUs that split every layer, if the engine can split layers.", minimum=1
    )
    pipeline_parallel_size: int = option(
        1, "GPUs that each hold some of the layers, if the engine can divide layers among GPUs.", minimum=1
    )
    engine_args: str | None = option(
        None, "More options for the engine's own command, all in one quoted string."
    )
    baseline_engine_args: str | None = option(
        None,
        "Options for the engine's own command on the baseline's side, instead of --engine-args.",
        unless_given="as --engine-args",
    )
    startup_timeout: int = option(1800, "Seconds that a server may take to start.", minimum=1)

    def __post_init__(self) -> None:
        check_options(self)
        for side in ("artifact", BASELINE):
            for word in self.words(side):
                if word in OWN_OPTIONS:
                    raise UserError(
                        f"{word} is among the engine's own arguments; give {OWN_OPTIONS[word]} instead"
                    )

    @property
    def gpus(self) -> int:
        """Return the number of GPUs of one server."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def on_a_cluster(self) -> bool:
        """Say whether Ray assigns the servers' GPUs, on one or more machines."""
        return any(self.value_of(BACKEND, side) == RAY for side in ("artifact", BASELINE))

    def value_of(self, option: str, side: str) -> str | None:
        """Return the value of an option in the words for that side's server; the last value if the option is
        given twice.
        """
        words = self.words(side)
        given = [value for word, value in itertools.pairwise(words) if word == option]
        return given[-1] if given else None

    def words(self, side: str) -> list[str]:
        """Return the additional words in the command of that side's server; an option and its value are two
        words, with hyphens in its name."""
        text, given = self.engine_args, "--engine-args"
        if side == BASELINE and self.baseline_engine_args is not None:
            text, given = self.baseline_engine_args, "--baseline-engine-args"
        try:
            words = shlex.split(text or "")
        except ValueError as error:
            raise UserError(
                f"{given} {text!r} cannot be split into words as a shell does it: {error}"
            ) from error
        return [part for word in words for part in _option_and_value(word)]

    def groups(self, sides: int, first: int = 0) -> list[tuple[int, ...]]:
        """Return the GPUs of each of `sides` servers: a group each, or one group for all.

        Any other number of named GPUs raises UserError. first: the only GPU if none are named
        """
        devices = self.devices or tuple(range(first, first + self.gpus))
        if len(devices) == self.gpus:
            return [devices] * sides
        if len(devices) == self.gpus * sides:
            return [devices[start : start + self.gpus] for start in range(0, len(devices), self.gpus)]
        raise UserError(
            f"--devices names {len(devices)} GPUs; a server runs on {self.gpus}, so name {self.gpus} "
            f"GPUs that all servers share, or {self.gpus * sides} for {sides} servers side by side"
        )

    def for_servers(self, sides: int) -> "Placement":
        """Return the placement with only as many GPUs as `sides` servers can use: the first of the named
        GPUs.
        """
        for wanted in (self.gpus * sides, self.gpus):
            if self.devices is not None and len(self.devices) >= wanted:
                return replace(self, devices=self.devices[:wanted])
        return self

    def asked_for(self) -> dict[str, OptionValue]:
        """Return the options that differ from the defaults, by name."""
        return {
            field.name: value
            for field in fields(self)
            if (value := getattr(self, field.name)) != field.default
        }


def _option_and_value(word: str) -> list[str]:
    """Split `--a_b=c` into `--a-b`, `c`, which means the same to vLLM."""
    if not word.startswith("--"):
        return [word]
    name, *value = word.split("=", 1)
    return [name.replace("_", "-"), *value]


ANYWHERE = Placement()
PLACEMENT = frozenset(field.name for field in fields(Placement))


def only_these(devices: Sequence[int]) -> dict[str, str]:
    """Return the environment of a process that sees only the given GPUs; the numbers are those by which this
    process knows them.
    """
    visible = os.environ.get(VISIBLE)
    names = visible.split(",") if visible else None
    chosen = [names[device].strip() if names and device < len(names) else str(device) for device in devices]
    return {VISIBLE: ",".join(chosen)} if chosen else {}
