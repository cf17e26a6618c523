"""Reading JSON and YAML from untrusted files, with limits on size, depth and number of values.

Every record, config, header and card of a checkpoint or an artifact is read here. Whatever a file contains,
the result is its content or a UserError, in bounded time and memory. Tensors are read elsewhere.
"""

import json
import math
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from .errors import UserError

MAX_BYTES = 32 << 20
"""The size limit of a JSON file. The largest real files are indexes of mixture-of-experts models: 12 MB."""
MAX_YAML_BYTES = 1 << 20
"""The size limit of front matter. The largest in real model cards hold tables of scores, a quarter of
this."""
MAX_VALUES = 2_000_000
"""Commas and opening brackets, which bound the number of values. 200,000 tensors have 1.6 million."""
MAX_DEPTH = 64
TOO_LARGE_FOR_INT64 = 1 << 63


def read_outside(path: Path, limit: int = MAX_BYTES) -> bytes:
    """Return the content of a regular file. A missing file raises FileNotFoundError, any other problem
    UserError.

    Pipes and devices are refused without waiting for them: the file is opened without blocking.
    """
    try:
        # O_NONBLOCK: opening a pipe that nobody writes to would wait for ever.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise UserError(f"{path} is not a regular file; put a regular file in its place")
            if status.st_size > limit:
                raise UserError(
                    f"{path} has {status.st_size:,} bytes, more than the {limit:,} that such a file may have"
                )
            return file.read(limit)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; check its kind and permissions") from error
    except ValueError as error:
        raise UserError(f"cannot read {str(path)!r}: {error}; give another name") from error


def read_json_object(path: Path, *, advice: str = "", infinity: bool = False) -> dict[str, Any]:
    """Return the object in the JSON file `path`. A UserError says what is wrong; `advice` says what to do
    about it.
    """
    try:
        raw = read_outside(path)
    except FileNotFoundError as error:
        raise UserError(f"cannot read {path}: {error.strerror}{_then(advice)}") from error
    value = parse_json(raw, str(path), advice=advice, infinity=infinity)
    if not isinstance(value, dict):
        raise UserError(f"{path} should hold a JSON object, not {type(value).__name__}{_then(advice)}")
    return value


def parse_json(raw: bytes | str, where: str, *, advice: str = "", infinity: bool = False) -> Any:
    """Return the JSON value `raw`. A UserError names the place, `where`.

    infinity: accept `Infinity` and `-Infinity`, which transformers writes into configs
    """
    try:
        text = raw if isinstance(raw, str) else raw.decode("utf-8")
        if text.count(",") + text.count("[") + text.count("{") > MAX_VALUES:
            raise ValueError(f"it holds more than {MAX_VALUES:,} values")
        value = json.loads(text, parse_float=_finite, parse_constant=_constant(infinity))
        _check_depth(value)
        if "\\u" in text:
            _refuse_half_characters(value)
        return value
    except RecursionError:
        why = f"it is nested more than {MAX_DEPTH} deep"
    except ValueError as error:
        why = str(error)
    raise UserError(f"{where} is not valid JSON: {why}{_then(advice)}")


def parse_yaml(text: str, where: str, loader: type, limit: int = MAX_YAML_BYTES, *, advice: str = "") -> Any:
    """Return the YAML value `text`, read with `loader`. A UserError names the place, `where`.

    Aliases are refused: a few lines of them can expand to gigabytes.
    """
    try:
        refuse_heavy_yaml(text, where, loader, limit)
        value = yaml.load(text, Loader=loader)
    except UserError:
        raise
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        why = error.problem or error.context
        raise UserError(f"{where}{place}: not valid YAML: {why}{_then(advice)}") from error
    except Exception as error:
        # PyYAML raises whatever a strange date, number or tag happens to break.
        why = " ".join(str(error).split())
        raise UserError(f"{where}: not valid YAML: {why}{_then(advice)}") from error
    _refuse_strange_numbers(value, where)
    return value


def refuse_heavy_yaml(text: str, where: str, loader: type, limit: int = MAX_YAML_BYTES) -> None:
    """Raise UserError if `text` is too long, too deep, or has an alias; yaml.YAMLError for a syntax error."""
    if len(text) > limit:
        raise UserError(f"{where} has more than {limit:,} characters of YAML; make it shorter")
    depth = 0
    for event in yaml.parse(text, Loader=loader):
        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent):
            raise UserError(f"{where}, line {line}: YAML aliases (`*name`) are not read; write the value out")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise UserError(f"{where}, line {line}: nested more than {MAX_DEPTH} deep; write it flatter")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:40]} is too large")
    return value


def _constant(infinity: bool) -> Callable[[str], float]:
    def constant(name: str) -> float:
        if infinity and name != "NaN":
            return float(name)
        raise ValueError(f"{name} is not a number of JSON")

    return constant


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        inner: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                inner += item.values()
            elif isinstance(item, list):
                inner += item
        level = [item for item in inner if isinstance(item, dict | list)]
        if not level:
            return
    raise RecursionError


def _refuse_half_characters(value: Any) -> None:
    """Raise ValueError for a lone surrogate, which JSON can express but no file or terminal can hold."""
    json.dumps(value, ensure_ascii=False).encode("utf-8")


def _refuse_strange_numbers(value: Any, where: str) -> None:
    if isinstance(value, dict):
        for item in (*value, *value.values()):
            _refuse_strange_numbers(item, where)
    elif isinstance(value, list | tuple | set):
        for item in value:
            _refuse_strange_numbers(item, where)
    elif isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{where}: {value} is not a finite number; give one")
    elif isinstance(value, int) and abs(value) >= TOO_LARGE_FOR_INT64:
        raise UserError(f"{where}: a whole number of {value.bit_length()} bits is too large; give less")


def _then(advice: str) -> str:
    return f"; {advice}" if advice else ""
