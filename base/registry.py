"""A table of implementations by name. An unknown name raises an error that lists the known names."""

from collections.abc import Iterator
from typing import Generic, TypeVar

from .errors import UserError
from .plugins import load_plugins

T = TypeVar("T")


class Registry(Generic[T]):
    """Implementations of one kind by name, in the order in which they were added.

    The first look-up in any registry loads the plugins, so that their implementations are found too.
    """

    def __init__(self, kind: str):
        self.kind = kind
        self._entries: dict[str, T] = {}

    def add(self, name: str, entry: T) -> T:
        if name in self._entries:
            raise ValueError(f"{self.kind} {name!r} is registered twice")
        self._entries[name] = entry
        return entry

    def __getitem__(self, name: str) -> T:
        load_plugins()
        try:
            return self._entries[name]
        except KeyError:
            choices = ", ".join(self._entries)
            raise UserError(f"unknown {self.kind} {name!r}; choose one of: {choices}") from None

    def __contains__(self, name: str) -> bool:
        load_plugins()
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        load_plugins()
        return iter(self._entries)

    def items(self) -> list[tuple[str, T]]:
        load_plugins()
        return list(self._entries.items())
