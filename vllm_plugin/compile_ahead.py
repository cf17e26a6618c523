"""Has the kernels of the chosen layers compiled by other processes while vLLM starts.

Otherwise start-up takes ten to twenty seconds longer. What these processes have not compiled, for whatever
reason, is compiled at the first product (`warm_up.py`).
"""

import json
import subprocess
import sys

from ..layouts.formats.weight_format import spec_to_json
from ..layouts.packing.layout import Problem

COMPILER = f"{__package__}.compiler"
MOST_SECONDS = 120
"""How long to wait for the compilers, by far longer than they need."""
COMPILERS: list[subprocess.Popen[str]] = []
"""The one that was started and has not been waited for, if any."""


def compile_ahead(layout: str, problem: Problem, most: int) -> None:
    """Have the forms of a layout's kernel compiled that layers like this need for up to `most` rows."""
    layer = {
        "layout": layout,
        "spec": spec_to_json(problem.spec),
        "dtype": str(problem.dtype).removeprefix("torch."),
        "n": problem.n,
        "k": problem.k,
        "most": most,
    }
    try:
        if not COMPILERS:
            COMPILERS.append(started())
        pipe = COMPILERS[0].stdin
        if pipe is not None:
            pipe.write(json.dumps(layer) + "\n")
            pipe.flush()
    except OSError:  # it could not be started, or has ended
        COMPILERS.clear()


def started() -> subprocess.Popen[str]:
    command, silent = [sys.executable, "-P", "-m", COMPILER], subprocess.DEVNULL
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=silent, stderr=silent, text=True)


def wait_for_compilers() -> None:
    """Wait until everything is compiled that was asked for."""
    while COMPILERS:
        compiler = COMPILERS.pop()
        try:
            compiler.communicate(timeout=MOST_SECONDS)
        except (OSError, subprocess.TimeoutExpired):
            compiler.kill()
