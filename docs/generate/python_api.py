"""The Python API as a page: the signature and docstring of every public name, fields with what they mean."""

import ast
import dataclasses
import inspect
import textwrap
from typing import Any

import scalegate

COMMANDS = ("quantize", "layout", "validate", "push", "release", "adopt", "sign", "verify", "serve")
ENGINE = ("LLM", "Generation", "SamplingParams", "EngineOptions", "UserError")


def reference() -> str:
    assert sorted((*COMMANDS, *ENGINE)) == sorted(scalegate.__all__)
    parts = ["## The commands as functions", *map(_entry, COMMANDS), "## The engine", *map(_entry, ENGINE)]
    return "\n\n".join(parts) + "\n"


def _entry(name: str) -> str:
    subject = getattr(scalegate, name)
    parts = [f"### {name}"]
    if dataclasses.is_dataclass(subject):
        parts += [*_docstring(subject), _fields(subject)]
    else:
        parts += [_signature(name, subject), *_docstring(subject)]
        if inspect.isclass(subject) and not issubclass(subject, Exception):
            parts += _docstring(subject.__init__)
            parts += [part for method in _methods(subject) for part in _method(subject, method)]
    return "\n\n".join(parts)


def _methods(subject: type) -> list[str]:
    return [name for name, value in vars(subject).items() if not name.startswith("_") and callable(value)]


def _method(subject: type, name: str) -> list[str]:
    method = getattr(subject, name)
    return [f"#### {subject.__name__}.{name}", _signature(name, method), *_docstring(method)]


def _signature(name: str, subject: Any) -> str:
    try:
        parameters = inspect.signature(subject).parameters.values()
    except ValueError:
        return f"```python\n{name}(...)\n```"
    words = [str(parameter) for parameter in parameters if parameter.name != "self"]
    keywords = [p.kind is p.KEYWORD_ONLY for p in parameters if p.name != "self"]
    if True in keywords:
        words.insert(keywords.index(True), "*")
    lines = "".join(f"    {word},\n" for word in words)
    return f"```python\n{name}(\n{lines})\n```" if words else f"```python\n{name}()\n```"


def _docstring(subject: Any) -> list[str]:
    """Its first paragraph as text, the rest, which is laid out by hand, as it stands."""
    first, _, rest = (inspect.getdoc(subject) or "").partition("\n\n")
    parts = [" ".join(first.split())] if first else []
    return [*parts, f"```text\n{rest}\n```"] if rest.strip() else parts


def _fields(subject: type) -> str:
    meanings = _attribute_docstrings(subject)
    lines = ["| field | default | meaning |", "| --- | --- | --- |"]
    for field in dataclasses.fields(subject):
        meaning = field.metadata.get("help") or meanings.get(field.name, "")
        cells = [f"`{field.name}`", _default(field), " ".join(meaning.split())]
        lines.append(f"| {' | '.join(cells)} |".replace("|  |", "| |"))
    return "\n".join(lines)


def _default(field: Any) -> str:
    if field.default is not dataclasses.MISSING:
        return f"`{field.default!r}`"
    return "" if field.default_factory is dataclasses.MISSING else f"`{field.default_factory()!r}`"


def _attribute_docstrings(subject: type) -> dict[str, str]:
    """The string below each field."""
    [tree] = ast.parse(textwrap.dedent(inspect.getsource(subject))).body
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for field, text in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            found[ast.unparse(field.target)] = ast.literal_eval(text.value)
    return found
