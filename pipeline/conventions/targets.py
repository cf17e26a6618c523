"""The patterns by which a quantization config names modules: this file matches patterns, and writes a set of
names as few patterns.

Both compressed-tensors' patterns (exact names, `re:` expressions, class names) and ModelOpt's (shell
wildcards) are known.
"""

import fnmatch
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

from ..records.name_patterns import start_match

Group = TypeVar("Group", bound=Hashable)

REGEX_PREFIX = "re:"
LINEAR = "Linear"


def matches(pattern: str, module: str) -> bool:
    """Say whether a compressed-tensors pattern names this module; `re:` anchors at the start, as in the
    library.
    """
    if pattern.startswith(REGEX_PREFIX):
        return start_match(pattern.removeprefix(REGEX_PREFIX), module)
    return pattern == module


def first_match(patterns: Iterable[str], module: str) -> str | None:
    """Return the most specific pattern that names a linear module: exact, then regular expression, then
    class.
    """
    ordered = sorted(patterns, key=lambda pattern: (pattern == LINEAR, pattern.startswith(REGEX_PREFIX)))
    return next((p for p in ordered if matches(p, module) or p == LINEAR), None)


def matches_wildcard(pattern: str, module: str) -> bool:
    """Say whether a ModelOpt exclusion (`lm_head`, `model.layers.0.*`) names the module or a parent of it."""
    return fnmatch.fnmatchcase(module, pattern) or module.startswith(pattern + ".")


def as_patterns(groups: Mapping[Group, Sequence[str]], others: Iterable[str]) -> dict[Group, list[str]]:
    """Write each group's module names as few patterns that match no module of another group.

    Names that differ only in numbers (layers, experts) become one regular expression, provided that every
    known name of that form is in the same group; the rest stay as they are. `others` are names in no group.
    """
    owners: dict[str, set[Group | None]] = {}
    for group, names in groups.items():
        for name in names:
            owners.setdefault(_any_number(name), set()).add(group)
    for name in others:
        owners.setdefault(_any_number(name), set()).add(None)
    patterns: dict[Group, list[str]] = {}
    for group, names in groups.items():
        written: dict[str, None] = {}
        for name in names:
            form = _any_number(name)
            shared = len(owners[form]) > 1 or form == re.escape(name)
            written[name if shared else f"{REGEX_PREFIX}{form}$"] = None
        patterns[group] = list(written)
    return patterns


def _any_number(name: str) -> str:
    """Return a regular expression for the name with any number in the place of each path part that is a
    number.
    """
    return r"\.".join(r"\d+" if part.isdigit() else re.escape(part) for part in name.split("."))
