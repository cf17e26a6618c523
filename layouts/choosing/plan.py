"""The layout plan: which layout serves each distinct layer shape, and the measurements behind the choice.

A plan is plain data, written into `scalegate.json`. `choose.py` makes it.
"""

import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from ...base.installed import kernel_versions
from ..packing.layout import Problem

THREADS = " x"
"""The separator between a CPU's model and its number of threads in a device's name."""


@dataclass(frozen=True)
class Measurement:
    """One layout on one shape at one M."""

    layout: str
    kernel: str
    m: int
    microseconds: float
    baseline_microseconds: float
    """The time of the unquantized product `x @ W.T` in the same dtype and the same run."""

    @property
    def ratio(self) -> float:
        """Return how many times faster it is than the unquantized product; below 1 is slower."""
        return self.baseline_microseconds / self.microseconds


@dataclass(frozen=True)
class KVMeasurement:
    """One KV format at one context and M: storing and attending in a decode step, over all layers."""

    kv_format: str
    context: int
    """Number of tokens in each request's context."""
    m: int
    microseconds: float
    baseline_microseconds: float
    """The time of the same step with unquantized keys and values, in the same run."""
    plain_microseconds: float | None = None
    """The time of a step in which no page becomes full; null in plans of older versions."""
    full_page_microseconds: float | None = None
    """The time of a step in which every request's page becomes full, once in as many steps as a page has
    tokens."""

    @property
    def ratio(self) -> float:
        """Return how many times faster it is than unquantized; below 1 is slower."""
        return self.baseline_microseconds / self.microseconds

    @property
    def writing_share(self) -> float:
        """The share of the time lost against unquantized that is spent on writing full pages, 0 to 1."""
        lost = self.microseconds - self.baseline_microseconds
        if self.plain_microseconds is None or lost <= 0:
            return 0.0
        return min(1.0, max(0.0, self.microseconds - self.plain_microseconds) / lost)


@dataclass(frozen=True)
class ShapeChoice:
    """The layout chosen for one layer shape, and all measurements behind the choice."""

    shape: str
    """The problem as text: `int4 g128 zp 24576x4096 bfloat16`."""
    layout: str
    modules: tuple[str, ...]
    measurements: tuple[Measurement, ...] = ()
    reason: str = ""
    refusals: Mapping[str, str] = field(default_factory=dict)
    """Layouts that were not timed, with the reason."""
    forced: bool = False
    """Whether the user named the layout, whatever the measurements say."""

    def curve(self, layout: str) -> dict[int, Measurement]:
        """Return the measurements of one layout by M, ascending; empty if it was not timed."""
        by_m = {each.m: each for each in self.measurements if each.layout == layout}
        return dict(sorted(by_m.items()))

    @property
    def measured_layouts(self) -> list[str]:
        return list(dict.fromkeys(measurement.layout for measurement in self.measurements))


@dataclass(frozen=True)
class LayoutPlan:
    """A choice for every distinct shape of one model, made on one device with one set of versions."""

    device: str
    versions: dict[str, str]
    choices: tuple[ShapeChoice, ...] = field(default_factory=tuple)
    kv: tuple[KVMeasurement, ...] = ()
    """Empty if KV formats were not timed."""
    kv_left_out: tuple[tuple[int, int], ...] = ()
    """Pairs of context and M that were not timed because keys and values did not fit in memory."""

    def layout_for(self, problem: Problem) -> str | None:
        key = str(problem)
        return next((choice.layout for choice in self.choices if choice.shape == key), None)

    def fits(self, device: torch.device) -> bool:
        """Say whether the plan is for this kind of device. On a CPU, the number of threads does not matter.

        Processes on one machine may have different numbers of threads, but must load an artifact in the same
        layouts.
        """
        if device.type == "cuda":
            return self.device == device_name(device)
        return self.device.rpartition(THREADS)[0] == _cpu_model()

    def covers(self, problems: Mapping[str, Problem], layouts: Mapping[str, str]) -> bool:
        """Say whether each of the given layers, by module name, was timed in its layout on this kind of
        device.
        """
        timed = {choice.shape: choice.measured_layouts for choice in self.choices}
        return all(
            name in problems
            and self.fits(problems[name].device)
            and layout in timed.get(str(problems[name]), ())
            for name, layout in layouts.items()
        )

    def matches(self, device: torch.device, versions: Mapping[str, str] | None = None) -> bool:
        """Say whether the plan was made on this device with these versions; None: the installed versions."""
        versions = kernel_versions() if versions is None else versions
        return self.device == device_name(device) and self.versions == dict(versions)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "LayoutPlan":
        choices = tuple(
            ShapeChoice(
                shape=choice["shape"],
                layout=choice["layout"],
                modules=tuple(choice["modules"]),
                measurements=tuple(Measurement(**m) for m in choice["measurements"]),
                reason=choice["reason"],
                refusals=dict(choice.get("refusals", {})),
                forced=choice.get("forced", False),
            )
            for choice in value["choices"]
        )
        kv = tuple(KVMeasurement(**fields) for fields in value.get("kv", ()))
        left_out = tuple((context, m) for context, m in value.get("kv_left_out", ()))
        return cls(value["device"], dict(value["versions"]), choices, kv, left_out)

    def pays_from(self, kv_format: str, m: int) -> int | None:
        """Return the context from which on `kv_format` is no slower than unquantized at M; None if it always
        is slower.
        """
        slower, pays = True, None
        for measurement in sorted(self.kv, key=lambda measurement: measurement.context):
            if (measurement.kv_format, measurement.m) != (kv_format, m):
                continue
            if measurement.ratio < 1:
                slower, pays = True, None
            elif slower:
                slower, pays = False, measurement.context
        return pays


def device_name(device: torch.device) -> str:
    """Return the device as a plan records it: the GPU's product name, or the CPU's model and number of
    threads.
    """
    threads = "" if device.type == "cuda" else f"{THREADS}{torch.get_num_threads()}"
    return device_model(device) + threads


def device_model(device: torch.device) -> str:
    """Return the GPU's product name, or the CPU's model. A plan is followed only on the same model."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_model()


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()
