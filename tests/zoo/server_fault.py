"""What a fault of a server is: where it is put, the check that must catch it, and that check's words.

The faults themselves are in `servers*.py`; `all_server_faults.py` has them all.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from scalegate.serving_check.engine.engine import Engine
from scalegate.serving_check.engine.request import SamplingParams, StepOutput
from scalegate.serving_check.server.generation import Delta, Generation

M = 8
"""Requests that the zoo runs together; some faults are for that load alone."""
TOGETHER = "+"
"""Between the names of faults that are on at once."""
SLOWER = 4
"""Times as long as a sound step: no noise hides it."""

Deltas = AsyncIterator[list[Delta]]
Step = Callable[[], list[StepOutput]]


@dataclass
class Traffic:
    """What the server's faults know of all requests."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    seen: int = 0
    open: int = 0
    cache: dict[tuple[int, ...], list[list[Delta]]] = field(default_factory=dict)
    last_prompt: list[int] = field(default_factory=list)
    kept: list[bytes] = field(default_factory=list)
    prefixes: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    """The first prompt with these first tokens."""


EngineFault = Callable[[Engine], Callable[[Step], list[StepOutput]]]
AbortFault = Callable[[Engine, str, Callable[[str], None]], None]
ParamsFault = Callable[[SamplingParams], SamplingParams]
RequestFault = Callable[[Traffic, Generation, Callable[[], Deltas]], Deltas]
StreamFault = Callable[[Traffic, Deltas], Deltas]


@dataclass(frozen=True)
class Fault:
    name: str
    check: str
    """Which must not pass."""
    words: str
    """Which its reason must hold: the cause, not only the symptom."""
    where: str
    """engine, abort, texts, params, request, stream, events or whole: around what it is put, and so what
    `inject` is."""
    inject: Any
    quick: bool
    """A short load shows it."""
    rare: bool
    """Not seen in a workload of seconds: it gets one of a minute."""
    long_prompts: bool
    """Hidden behind, or in, the reading of prompts: it gets long ones."""
    in_use: bool
    """Hidden from requests that are all alike: it gets a load as in use."""
    profile: str | None
    """The profile of loads that shows it, which is then sent as well."""


FAULTS: dict[str, Fault] = {}


def fault(
    where: str,
    check: str,
    words: str,
    quick: bool = False,
    rare: bool = False,
    long_prompts: bool = False,
    in_use: bool = False,
    profile: str | None = None,
) -> Callable[[Any], Any]:
    """Register a function as a fault under its own name."""

    def register(inject: Any) -> Any:
        name = inject.__name__
        in_a_use = in_use or profile is not None
        FAULTS[name] = Fault(name, check, words, where, inject, quick, rare, long_prompts, in_a_use, profile)
        return inject

    return register


def of(where: str) -> dict[str, Any]:
    return {name: fault.inject for name, fault in FAULTS.items() if fault.where == where}


def slowed(step: Step, factor: float) -> list[StepOutput]:
    """A busy wait: a sleep would end late on a busy machine."""
    started = time.perf_counter()
    outputs = step()
    until = started + (time.perf_counter() - started) * factor
    while time.perf_counter() < until:
        pass
    return outputs
