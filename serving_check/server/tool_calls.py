"""Calls of tools in a model's output, for the forms that chat templates teach: calls are found, cut out and
parsed.

The chat template of a model shows in which form the model writes calls. Not for running tools.
"""

import json
import re
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .text import StopStrings


@dataclass(frozen=True)
class ToolFormat:
    """How a model writes calls: each, or all in a list, as JSON after `begin` and up to `end`."""

    name: str
    begin: str
    end: str | None
    """The text after the calls; None if calls go on to the end of the answer."""
    template_marks: tuple[str, ...]
    """Texts that every chat template of this form contains."""
    special: bool
    """Whether `begin` is a special token, which must then not be skipped in the text."""


HERMES = ToolFormat("hermes", "<tool_call>", "</tool_call>", ("<tool_call>",), special=False)
MISTRAL = ToolFormat("mistral", "[TOOL_CALLS]", None, ("[TOOL_CALLS]",), special=True)
LLAMA = ToolFormat("llama3_json", "<|python_tag|>", None, ("<|python_tag|>", '"parameters"'), special=True)
FORMATS = (HERMES, MISTRAL, LLAMA)
MISTRAL_CALL = re.compile(r"\s*([A-Za-z0-9_.\-]+)\s*(?:\[ARGS\])?(?=\{)")
"""A call in the form of newer Mistral models: the name, then the arguments."""


def format_of(template: str | None) -> ToolFormat | None:
    """Return the form that a chat template teaches; None if the template has no tools, or an unknown form."""
    if not template or "tools" not in template:
        return None
    return next((form for form in FORMATS if any(mark in template for mark in form.template_marks)), None)


@dataclass(frozen=True)
class ToolCall:
    """One call; its arguments are JSON."""

    name: str
    arguments: str

    def to_json(self) -> dict[str, Any]:
        return {
            "id": f"call_{uuid.uuid4().hex[:24]}",
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }


class ToolParser:
    """Splits one answer, as it arrives, into text and calls; an invalid call stays text."""

    def __init__(self, form: ToolFormat, is_call: bool, most: int | None):
        """is_call: whether the whole answer is a JSON list of calls. most: how many calls are kept; None for
        all."""
        self._form = form
        self._is_call = is_call
        self._most = most
        self._begin = StopStrings([form.begin])
        self._call: str | None = "" if is_call else None
        """The text since `begin`; None outside a call."""
        self._started = False
        self.found = 0
        """Number of calls so far."""

    def feed(self, text: str) -> tuple[str, list[ToolCall]]:
        """Return text that is certainly no part of a call, and the calls that are complete."""
        if self._is_call:
            self._call = (self._call or "") + text
            return "", []
        if self._form is LLAMA and not self._started and text.strip():
            # Its calls come bare as well: then an answer begins with a brace.
            self._started = True
            if text.lstrip().startswith("{"):
                self._call = ""
        shown, calls = "", list[ToolCall]()
        while True:
            if self._call is None:
                before, rest = self._split(text)
                shown += before
                if rest is None:
                    return shown, calls
                self._call, text = "", rest
            self._call += text
            end = self._form.end
            if end is None or end not in self._call:
                return shown, calls
            body, _, text = self._call.partition(end)
            self._call = None
            before, new = self._parsed(body, self._form.begin + body + end)
            shown += before
            calls += new

    def flush(self) -> tuple[str, list[ToolCall]]:
        """Return the text and calls held back, at the end of the answer."""
        if self._call is None:
            return self._begin.flush(), []
        bare = self._is_call or (self._form is LLAMA and self._call.lstrip().startswith("{"))
        shown, calls = self._parsed(self._call, self._call if bare else self._form.begin + self._call)
        self._call = None
        return shown, calls

    def _split(self, text: str) -> tuple[str, str | None]:
        """Return the text before `begin`, and the text after it; None if `begin` is not there yet."""
        held = self._begin.held + text
        before = self._begin.feed(text)
        if not self._begin.found:
            return before, None
        self._begin = StopStrings([self._form.begin])
        return before, held.partition(self._form.begin)[2]

    def _parsed(self, body: str, whole: str) -> tuple[str, list[ToolCall]]:
        """Return the calls in `body`, or `whole` as text if `body` has no calls."""
        calls = calls_in(body)
        if not calls:
            return whole, []
        calls = calls[: None if self._most is None else self._most - self.found]
        self.found += len(calls)
        return "", calls


def calls_in(body: str) -> list[ToolCall]:
    """Return all calls in `body`; none if any part of it is something else."""
    calls = []
    rest = body.strip()
    try:
        while rest:
            name = MISTRAL_CALL.match(rest)
            if name:
                rest = rest[name.end() :]
            value, end = json.JSONDecoder().raw_decode(rest)
            rest = rest[end:].lstrip(" \t\r\n;,")
            listed = [{"name": name[1], "arguments": value}] if name else value
            calls += [_call(call) for call in (listed if isinstance(listed, list) else [listed])]
    except (ValueError, KeyError, TypeError, RecursionError):
        return []
    return calls


def _call(value: dict[str, Any]) -> ToolCall:
    name = value["name"]
    if not isinstance(name, str) or not name:
        raise ValueError("a call without a name")
    arguments = value.get("arguments", value.get("parameters", {}))
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return ToolCall(name, text)


def numbered(calls: list[ToolCall], first: int) -> Iterator[dict[str, Any]]:
    """Yield the calls in the form of a stream; each call is complete and has its number."""
    for index, call in enumerate(calls, first):
        yield {"index": index, **call.to_json()}
