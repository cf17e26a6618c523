"""Detects compilations and graph captures after warm-up, which delay requests. The monitor does not prevent
them.

Triton's compilations are told apart from loads of its disk cache, which take less time. Compilations inside
Dynamo, such as Inductor's, count as Dynamo's.
"""

import functools
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Literal
from weakref import WeakSet

from ...base.log import logger

Kind = Literal[
    "triton compilation",
    "triton cache load",
    "triton autotuning",
    "dynamo compilation",
    "numba compilation",
    "graph capture",
]
Mode = Literal["off", "warn", "error"]


@dataclass(frozen=True)
class JitEvent:
    """A compilation or capture that should have happened in warm-up."""

    kind: Kind
    name: str
    """The name of the kernel, function or graph."""
    key: str = ""
    """The argument types, constants and specializations for which it was compiled."""

    def __str__(self) -> str:
        return f"{self.kind}: {self.name}{' for ' + self.key if self.key else ''}"


class JitError(RuntimeError):
    """Raised after a step in which something was compiled, in mode `error`."""


class JitMonitor:
    """Records events after `arm`."""

    def __init__(self, mode: Mode = "warn"):
        self.mode = mode
        self.events: list[JitEvent] = []
        """Events since the last `take`."""
        self._last: JitEvent | None = None

    def arm(self) -> None:
        if self.mode != "off":
            _listen()
            _ARMED.add(self)

    def disarm(self) -> None:
        _ARMED.discard(self)

    def notice(self, event: JitEvent) -> None:
        self.events.append(event)
        self._last = event
        logger.warning(f"compiled while serving; {event}")

    def take(self) -> tuple[JitEvent, ...]:
        """Return the events since the last call."""
        taken, self.events = tuple(self.events), []
        return taken

    def check(self) -> None:
        """Raise JitError if there was an event. Call this after a step: an error that is raised inside a
        compilation would be handled by the compiler.
        """
        if self._last is not None and self.mode == "error":
            raise JitError(f"compiled while serving; {self._last}")


_ARMED: WeakSet[JitMonitor] = WeakSet()


def report(event: JitEvent) -> None:
    """Pass an event to all armed monitors."""
    for monitor in list(_ARMED):
        monitor.notice(event)


def _listen() -> None:
    """Hook into the compilers, once. A listener that was there before is still called."""
    # Imported here: both take seconds to load, and a server's other process needs only what an event is.
    from torch._dynamo.callback import callback_handler

    if _dynamo_compiles not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(_dynamo_compiles)
    # Not imported here: an engine that uses numba has imported it before requests come.
    if "numba" in sys.modules:
        _listen_to_numba()
    if importlib.util.find_spec("triton") is None:
        return
    import triton

    before = triton.knobs.compilation.listener
    if not isinstance(before, _TritonListener):
        triton.knobs.compilation.listener = _TritonListener(before)
        _listen_to(triton.runtime.autotuner.Autotuner)


@functools.cache
def _listen_to_numba() -> None:
    from numba.core import event

    class NumbaListener(event.Listener):
        def on_start(self, event: Any) -> None:
            function = event.data["dispatcher"].py_func
            report(JitEvent("numba compilation", function.__qualname__, str(event.data["args"])))

        def on_end(self, event: Any) -> None:
            """Do nothing: the compilation was reported when it began."""

    event.register("numba:compile", NumbaListener())


def _listen_to(autotuner: Any) -> None:
    """Report autotuning, for which Triton has no listener and which may not compile anything.

    Triton asks which configurations to try for every key that it has not seen yet; that call is reported.
    """
    prune_configs = autotuner.prune_configs

    @functools.wraps(prune_configs)
    def reporting(self: Any, kwargs: dict[str, Any]) -> Any:
        values = {**self.nargs, **kwargs}
        plain = {name: values[name] for name in self.keys if isinstance(values.get(name), int | float | str)}
        key = " ".join(f"{name}={value}" for name, value in plain.items())
        report(JitEvent("triton autotuning", self.base_fn.__name__, key))
        return prune_configs(self, kwargs)

    autotuner.prune_configs = reporting


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
    report(JitEvent("dynamo compilation", _function_on_the_stack(), f"compile id {args.compile_id}"))


def _function_on_the_stack() -> str:
    """Return the function that Dynamo compiles, with its file, from Dynamo's frames: its callbacks do not get
    it.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "_compile" and isinstance(frame.f_locals.get("code"), CodeType):
            code = frame.f_locals["code"]
            return f"{code.co_qualname} ({Path(code.co_filename).name}:{code.co_firstlineno})"
        frame = frame.f_back
    return "a function"
