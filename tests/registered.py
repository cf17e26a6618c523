"""An entry that a registry has for the length of a `with` block, for tests."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from scalegate.base.registry import Registry

T = TypeVar("T")


@contextmanager
def registered(registry: Registry[T], name: str, entry: T) -> Iterator[T]:
    registry.add(name, entry)
    try:
        yield entry
    finally:
        del registry._entries[name]
