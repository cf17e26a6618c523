"""What vLLM's compile cache must depend on: which version of the kernels serves, and what they serve.

A graph that was compiled with them calls our op on our bytes. Without them, with another version, or where
other layers are ours, it would read other bytes than it was made for.
"""

import hashlib
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("base", "kernels", "layouts", "vllm_plugin")
"""All folders of the wheel."""
SERVED: set[str] = set()
"""The kinds of layers that this process serves. Another GPU may be told to serve others."""


@cache
def digest() -> str:
    """Of every file of the wheel: changes with each change of the code and of the measurements."""
    found = hashlib.sha256()
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*")):
            if path.suffix in (".py", ".json"):
                found.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:16]


def factor() -> str:
    """The part of the key that is ours; vLLM asks for it when the model is loaded and not yet compiled."""
    return "; ".join((digest(), *sorted(SERVED)))
