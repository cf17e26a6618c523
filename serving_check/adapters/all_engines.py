"""Every engine, registered; import `ENGINES` from here. The module also finds the engine of a word after
`--engine`.
"""

from .embedded import EMBEDDED
from .engine import ENGINES, Engine
from .sglang import SGLANG
from .url import URL
from .vllm import VLLM

for engine in (EMBEDDED, VLLM, SGLANG, URL):
    ENGINES.add(engine.name, engine)

DEFAULT_ENGINE = EMBEDDED.name

__all__ = ["DEFAULT_ENGINE", "ENGINES", "engine_named", "find_engine"]


def find_engine(word: str) -> Engine | None:
    """Return the engine whose name or prefix is `word`; None if there is none."""
    for name, engine in ENGINES.items():
        if word == name or word.startswith(engine.prefixes):
            return engine
    return None


def engine_named(word: str) -> Engine:
    """Find an engine like `find_engine`, but raise UserError with the engines' names if there is none."""
    return find_engine(word) or ENGINES[word]
