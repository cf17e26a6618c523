"""Notices whatever is compiled or captured once the engine is warm: a pause that some request feels.

Not for preventing it. Triton's compilations are told from loads off its disk cache, which pause less; what
compiles inside Dynamo, as Inductor does, counts as Dynamo's.
"""

import logging
from dataclasses import dataclass
from typing import Any, Literal
from weakref import WeakSet

Kind = Literal["triton compilation", "triton cache load", "dynamo compilation", "graph capture"]
Mode = Literal["off", "warn", "error"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class JitEvent:
    """One thing that should have happened in warm-up."""

    kind: Kind
    name: str
    """The kernel's, or what else says which it was."""
    key: str = ""
    """What it was compiled for: argument types, constants, and what was specialized on."""

    def __str__(self) -> str:
        return f"{self.kind}: {self.name}{' for ' + self.key if self.key else ''}"


class JitError(RuntimeError):
    """Raised after a step in which something was compiled, where that is asked for."""


class JitMonitor:
    """Records events from `arm` on."""

    def __init__(self, mode: Mode = "warn"):
        self.mode = mode
        self.events: list[JitEvent] = []

    def arm(self) -> None:
        if self.mode != "off":
            _listen()
            _ARMED.add(self)

    def disarm(self) -> None:
        _ARMED.discard(self)

    def notice(self, event: JitEvent) -> None:
        self.events.append(event)
        logger.warning("compiled while serving; %s", event)

    def check(self) -> None:
        """Not raised where it happens: a compiler would take it for an error of its own."""
        if self.events and self.mode == "error":
            raise JitError(f"compiled while serving; {self.events[-1]}")


_ARMED: WeakSet[JitMonitor] = WeakSet()


def report(event: JitEvent) -> None:
    """Tell whoever is armed."""
    for monitor in list(_ARMED):
        monitor.notice(event)


def _listen() -> None:
    """Hook into both compilers, once, passing on to a listener that was there before."""
    # Imported here: Dynamo takes a second to load, and where nothing is monitored nothing needs it.
    import triton
    from torch._dynamo.callback import callback_handler

    if _dynamo_compiles not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(_dynamo_compiles)
    before = triton.knobs.compilation.listener
    if not isinstance(before, _TritonListener):
        triton.knobs.compilation.listener = _TritonListener(before)


class _TritonListener:
    def __init__(self, before: Any):
        self.before = before

    def __call__(self, *, src: Any, cache_hit: bool, **rest: Any) -> None:
        if self.before is not None:
            self.before(src=src, cache_hit=cache_hit, **rest)
        details = (getattr(src, name, None) for name in ("signature", "constants", "attrs"))
        kind: Kind = "triton cache load" if cache_hit else "triton compilation"
        report(
            JitEvent(kind, str(getattr(src, "name", src)), " ".join(str(part) for part in details if part))
        )


def _dynamo_compiles(args: Any) -> None:
    report(JitEvent("dynamo compilation", f"compile id {args.compile_id}"))
