"""Regular expressions over module names; expressions that could take forever to match are refused.

Python's `re` tries every way in which repeats can share a name, so that a short pattern can run forever. A
pattern's ways are counted before it is used: repeats in repeats are refused, and so are many repeats side by
side.
"""

import re
from functools import lru_cache
from itertools import zip_longest
from re import _constants as kinds  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

from ...base.errors import UserError

MAX_PATTERN = 4096
MAX_NAME = 160
"""Longer names are not matched; the longest of the architectures in transformers have about a hundred."""
MAX_WAYS = 50_000_000
"""The most ways to match a name of that length: three `.*` and some alternatives. A tenth of a second at
worst."""
REPEATS = (kinds.MAX_REPEAT, kinds.MIN_REPEAT, kinds.POSSESSIVE_REPEAT)
DIGIT = [(kinds.IN, [(kinds.CATEGORY, kinds.CATEGORY_DIGIT)])]


@lru_cache(maxsize=1024)
def compiled(pattern: str) -> re.Pattern[str]:
    """Return `pattern`, ready to match. Raise UserError if the pattern is not a valid expression, or might
    take very long to match.
    """
    shown = repr(pattern if len(pattern) <= 100 else pattern[:97] + "...")
    if len(pattern) > MAX_PATTERN:
        raise UserError(f"{shown} is not a valid expression: it has more than {MAX_PATTERN} characters")
    try:
        expression = re.compile(pattern)
        ways = _ways(parser.parse(pattern))
    except (re.error, RecursionError, OverflowError) as error:
        raise UserError(f"{shown} is not a valid expression: {error}") from error
    if ways > MAX_WAYS:
        raise UserError(
            f"{shown} may take very long to match: it has a repeat within a repeat, or more than "
            "three; write it with fewer, or as several patterns"
        )
    return expression


def full_match(pattern: str, name: str) -> bool:
    return compiled(pattern).fullmatch(_short(name)) is not None


def start_match(pattern: str, name: str) -> bool:
    return compiled(pattern).match(_short(name)) is not None


def _short(name: str) -> str:
    if len(name) > MAX_NAME:
        raise UserError(
            f"{name[:MAX_NAME]!r}… has more than {MAX_NAME} characters, too many to match expressions; "
            "use patterns without `re:`"
        )
    return name


def _is_no_digit(item: Any) -> bool:
    return item is not None and item[0] is kinds.LITERAL and not chr(item[1]).isdigit()


def _ways(tree: Any, repeated: bool = False) -> int:
    """Return about how many ways there are to try `tree` on a name; more than MAX_WAYS if that is
    unbounded.
    """
    ways = 1
    items = list(tree)
    for (kind, argument), following in zip_longest(items, items[1:]):
        if kind in REPEATS:
            least, most, body = argument
            if repeated and most > 1:
                return MAX_WAYS + 1
            if list(body) == DIGIT and not repeated and _is_no_digit(following):
                continue  # a number ends where something else begins: there is one way
            choices = min(int(most), MAX_NAME) - min(int(least), MAX_NAME) + 1
            inside = _ways(body, repeated=repeated or most > 1)
            if most > 1 and inside > 1:
                return MAX_WAYS + 1
            ways *= choices * inside
        elif kind is kinds.BRANCH:
            ways *= sum(_ways(branch, repeated) for branch in argument[1])
        elif kind is kinds.SUBPATTERN:
            ways *= _ways(argument[-1], repeated)
        elif kind in (kinds.ASSERT, kinds.ASSERT_NOT):
            ways *= _ways(argument[1], repeated)
        elif kind is kinds.ATOMIC_GROUP:
            ways *= _ways(argument, repeated)
        elif kind not in (kinds.LITERAL, kinds.NOT_LITERAL, kinds.ANY, kinds.IN, kinds.AT, kinds.CATEGORY):
            return MAX_WAYS + 1
        if ways > MAX_WAYS:
            return ways
    return ways
