"""The facts that vLLM's compile cache must depend on: the version of the kernels, and the layers that they
serve.

A graph that was compiled with the kernels calls our op on our bytes. Without the plugin, with another
version, or with other layers, a cached graph would read wrong bytes.
"""

import hashlib
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("base", "kernels", "layouts", "vllm_plugin")
"""All folders of the wheel that serve inside vLLM."""
KEYS_AND_VALUES = "keys and values in "
"""How the names in `SERVED` of formats of keys and values begin."""
SERVED: set[str] = set()
"""The kinds of layers that this process serves. Another GPU may be told to serve others."""


@cache
def digest() -> str:
    """Return the digest of every file of the wheel: it changes with each change of the code and of the
    measurements.
    """
    found = hashlib.sha256()
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*")):
            if path.suffix in (".py", ".json"):
                found.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:16]


def factor() -> str:
    """Return the part of the key that is ours; vLLM asks for it when the model is loaded and not yet
    compiled.
    """
    return "; ".join((digest(), *sorted(SERVED)))
