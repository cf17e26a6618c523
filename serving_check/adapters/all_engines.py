"""Every engine, registered; import `ENGINES` from here, and find the one that a word after `--engine` is."""

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
    """The engine that `word` names or begins like; None if none does."""
    for name, engine in ENGINES.items():
        if word == name or word.startswith(engine.prefixes):
            return engine
    return None


def engine_named(word: str) -> Engine:
    """As `find_engine`; UserError naming the engines there are where it is none of them."""
    return find_engine(word) or ENGINES[word]
