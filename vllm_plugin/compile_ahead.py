"""Has the kernels of the chosen layers compiled by other processes while vLLM starts.

Otherwise start-up takes ten to twenty seconds longer. What these processes have not compiled, for whatever
reason, is compiled at the first product (`warm_up.py`); vLLM's log then has one line with the reason.
"""

import contextlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO

from ..layouts.formats.weight_format import spec_to_json
from ..layouts.packing.layout import Problem

COMPILER = f"{__package__}.compiler"
MOST_SECONDS = 120
"""How long to wait for the compiler, by far longer than it needs."""
SETTINGS = "TRITON_"
"""How the names of the environment variables begin that Triton reads."""

logger = logging.getLogger("vllm.scalegate_kernels")


@dataclass(frozen=True)
class Compiler:
    """The process that compiles, which has others do it.

    settings: Triton's environment variables when it was started
    errors:   a file of what it and the others say
    """

    process: subprocess.Popen[str]
    settings: dict[str, str]
    errors: IO[str]

    @classmethod
    def start(cls) -> "Compiler":
        errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", COMPILER],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            text=True,
        )
        return cls(process, triton_settings(), errors)

    def send(self, line: str) -> None:
        if self.process.stdin is not None:
            try:
                self.process.stdin.write(line + "\n")
                self.process.stdin.flush()
            except OSError:
                self.wait()  # it has ended
                raise

    def wait(self) -> None:
        """Wait until the process has ended; RuntimeError says why something is not compiled."""
        try:
            status = self.process.wait(MOST_SECONDS)
        except subprocess.TimeoutExpired as error:
            self.process.kill()
            raise RuntimeError(str(error)) from error
        if status:
            self.errors.seek(0)
            said = [line.strip() for line in self.errors if line.strip()]
            raise RuntimeError(said[-1] if said else f"its exit status is {status}")


@dataclass
class Ahead:
    """What this process has begun: its compiler, and whether it has given up."""

    compiler: Compiler | None = None
    failed: bool = False


AHEAD = Ahead()


def compile_ahead(layout: str, problem: Problem, most: int) -> None:
    """Have the forms of a layout's kernel compiled that layers like this need for up to `most` rows."""
    _send({"layout": layout, "n": problem.n, "k": problem.k, "most": most}, problem)


def compile_experts_ahead(problem: Problem, most: int) -> None:
    """Have the kernels compiled that layers of experts like this need for up to `most` tokens.

    problem: of the first product, gate_up
    """
    if problem.experts is not None:
        count, top_k, inner = problem.experts.count, problem.experts.top_k, problem.n // 2
        _send({"experts": count, "top_k": top_k, "hidden": problem.k, "inner": inner, "most": most}, problem)


def _send(layer: dict[str, str | int], problem: Problem) -> None:
    if AHEAD.failed:
        return
    described = {"spec": spec_to_json(problem.spec), "dtype": str(problem.dtype).removeprefix("torch.")}
    try:
        if AHEAD.compiler is None:
            AHEAD.compiler = Compiler.start()
        AHEAD.compiler.send(json.dumps({**layer, **described}))
    except Exception as error:  # a server must start without it
        _give_up(error)


def wait_for_compiler() -> float:
    """Wait until everything is compiled that was asked for, and return how long that took, in seconds."""
    began = time.monotonic()
    if AHEAD.compiler is not None and not AHEAD.failed:
        try:
            AHEAD.compiler.send("")  # that was all
            AHEAD.compiler.wait()
        except Exception as error:  # a server must start without it
            _give_up(error)
    return time.monotonic() - began


def _give_up(error: Exception) -> None:
    AHEAD.failed = True
    logger.info("scalegate-kernels compiles its kernels at the first product, not ahead: %s", error)


@contextlib.contextmanager
def settings_of_compiler() -> Iterator[None]:
    """Within the block Triton has the settings that the compiler was started with.

    torch.compile may have changed since then where Triton looks for compiled kernels (`TRITON_CACHE_DIR`).
    """
    if AHEAD.compiler is None:
        yield
        return
    now = triton_settings()
    replace_settings(AHEAD.compiler.settings)
    try:
        yield
    finally:
        replace_settings(now)


def triton_settings() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(SETTINGS)}


def replace_settings(settings: dict[str, str]) -> None:
    for name in triton_settings():
        if name not in settings:
            del os.environ[name]
    os.environ.update(settings)
