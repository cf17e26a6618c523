"""A YAML mapping with the line of each of its values, so that an error can name the line of a mistake.

The meaning of the values is in `recipe_file.py`.
"""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ...base.errors import UserError
from ...base.untrusted_files import parse_yaml

Place = Sequence[str | int]
"""Keys and indexes that lead to a value, outermost first; none for the whole document."""


@dataclass(frozen=True)
class YamlLines:
    """The values of one document, and the nodes that they were made from."""

    path: Path
    values: dict[str, Any]
    node: yaml.MappingNode

    @classmethod
    def parse(cls, path: Path, text: str, limit: int, expectation: str) -> "YamlLines":
        """Parse a YAML mapping. Raise UserError for any other text, and for one of more than `limit`
        characters.
        """
        values = parse_yaml(text, str(path), yaml.SafeLoader, limit)
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if not isinstance(node, yaml.MappingNode):
            raise UserError(f"{path}: {expectation}")
        return cls(path, values, node)

    def require_keys(self, place: Place, valid: Sequence[str], where: str = "") -> None:
        """Raise UserError for a key of the mapping at `place` that is not `valid`, or that is there twice.

        where: the words of the error after the key
        """
        lines: dict[str, int] = {}
        for name, _ in self._node(place).value:
            key, line = str(name.value), name.start_mark.line + 1
            if key not in valid:
                close = difflib.get_close_matches(key, valid, n=1)
                hint = f"did you mean {close[0]!r}? " if close else ""
                raise self._error(line, f"unknown key {key!r}{where}; {hint}Valid keys: {', '.join(valid)}")
            if key in lines:
                raise self._error(line, f"key {key!r}{where} is there twice (first on line {lines[key]})")
            lines[key] = line

    def error(self, place: Place, message: str) -> UserError:
        """Return a UserError with the line of the value at `place`, or of the innermost part that is
        there.
        """
        return self._error(self._line(place), message)

    def _error(self, line: int | None, message: str) -> UserError:
        return UserError(f"{self.path}{f', line {line}' if line else ''}: {message}")

    def _line(self, place: Place) -> int | None:
        node: yaml.Node = self.node
        line = None
        for step in place:
            mark, child = _child(node, step)
            if child is None:
                break
            node, line = child, mark
        return line

    def _node(self, place: Place) -> yaml.Node:
        node: yaml.Node = self.node
        for step in place:
            _, child = _child(node, step)
            if child is None:
                raise KeyError(step)
            node = child
        return node


def _child(node: yaml.Node, step: str | int) -> tuple[int | None, yaml.Node | None]:
    """Return the line and the node of one key, or of one index; None if there is no such child."""
    if isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            if name.value == step:
                return name.start_mark.line + 1, value
    if isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
        return node.value[step].start_mark.line + 1, node.value[step]
    return None, None
