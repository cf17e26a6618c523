"""Options are defined once, as fields of a dataclass: type, default, help, legal values. Command lines,
signatures and records are made from these fields.

The options themselves are elsewhere (the engine's in `serving_check/engine/options.py`, the workload's in
`serving_check/settings.py`), and so is the command line (`pipeline/cli/`).
"""

import dataclasses
import difflib
import functools
import inspect
import os
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field
from pathlib import Path
from typing import Any, TypeVar, cast

from .errors import UserError

OptionValue = bool | int | str | tuple[int, ...] | None
"""The value of an engine's option, as a verdict records it."""
F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
ALL = "all"
KINDS = {
    int: "a whole number",
    float: "a number",
    str: "a name",
    Path: "a path",
    bool: "true or false",
    tuple: "distinct whole numbers, ascending",
}


def option(
    default: OptionValue | float | Path,
    help: str,
    *,
    name: str | None = None,
    formerly: str | None = None,
    metavar: str | None = None,
    choices: Callable[[], Iterable[str]] | None = None,
    suggestions: Callable[[], Iterable[str]] | None = None,
    minimum: int | None = None,
    above: float | None = None,
    any_order: bool = False,
    unless_given: str | None = None,
    count: Callable[[], int] | None = None,
) -> Any:
    """A field that is an option.

    name:         its name on command lines and in signatures; left out, the field's
    formerly:     a name that it had: whoever uses that one is told the new one
    metavar:      what the help shows for the value; left out, the choices, or what suits the type
    choices:      asked only when they are shown, or when a value other than the default is checked; a
                  registry's names then include what plugins have registered
    suggestions:  the same for values that are shown but are not the only ones
    minimum:      of a number, or of each of several
    above:        a number that it must be larger than
    any_order:    several numbers are sorted, whatever order they are given in
    unless_given: says what an option that is not given is worked out from; signatures then say None
    count:        how many there are here, where a command line may say `all` of them, numbered from 0
    """
    metadata = {
        "help": help,
        # Where pydantic writes a schema of the dataclass.
        "description": help,
        "name": name,
        "formerly": formerly,
        "metavar": metavar,
        "choices": choices,
        "suggestions": suggestions,
        "minimum": minimum,
        "above": above,
        "any_order": any_order,
        "unless_given": unless_given,
        "count": count,
    }
    return dataclasses.field(default=default, metadata=metadata)


def options_of(cls: type) -> list[Field[Any]]:
    """Return the fields that are options; other fields are computed, or cannot be set by a user."""
    return [field for field in dataclasses.fields(cls) if "help" in field.metadata]


def name_of(field: Field[Any]) -> str:
    """Return an option's name on command lines and in signatures, with underscores."""
    return field.metadata["name"] or field.name


def flag(name: str) -> str:
    """`--max-num-seqs` for max_num_seqs."""
    return "--" + name.replace("_", "-")


@functools.cache
def kind_of(cls: type, name: str) -> type:
    """Return int, float, str, Path, bool or tuple: the type of the option's value, if it is not None."""
    hint = typing.get_type_hints(cls)[name]
    if isinstance(hint, types.UnionType):
        [hint] = [part for part in typing.get_args(hint) if part is not types.NoneType]
    origin = typing.get_origin(hint) or hint
    return str if origin is typing.Literal else origin


def check(cls: type, field: Field[Any], value: Any) -> Any:
    """Return `value` as the option holds it. A UserError says what the value must be."""
    if type(value) is type(field.default) and value == field.default:
        return value
    metadata, kind = field.metadata, kind_of(cls, field.name)
    value = _as_kind(kind, value, metadata["any_order"])
    is_right = type(value) is kind or (kind is Path and isinstance(value, Path))
    if kind is tuple and is_right:
        numbers_alone = all(type(number) is int for number in value)
        is_right = bool(value) and numbers_alone and list(value) == sorted(set(value))
    minimum, above = metadata["minimum"], metadata["above"]
    numbers = value if kind is tuple else (value,)
    if is_right and minimum is not None:
        is_right = min(numbers) >= minimum
    if is_right and above is not None:
        is_right = min(numbers) > above
    if not is_right:
        least = "" if minimum is None else f", at least {minimum}"
        least += "" if above is None else f", above {above:g}"
        raise UserError(f"{name_of(field)} is {value!r}; it must be {KINDS[kind]}{least}")
    choices = metadata["choices"]
    if choices is not None and value not in (valid := list(choices())):
        raise UserError(f"unknown {name_of(field)} {value!r}; choose one of: {', '.join(valid)}")
    return value


def check_options(options: object) -> None:
    """Check every option of a frozen dataclass, in its `__post_init__`."""
    cls = type(options)
    for field in options_of(cls):
        object.__setattr__(options, field.name, check(cls, field, getattr(options, field.name)))


def _as_kind(kind: type, value: Any, any_order: bool) -> Any:
    """Convert `value` to the type that the field needs: a list of numbers to a tuple, a text to a path."""
    if kind is tuple and isinstance(value, Sequence) and not isinstance(value, str):
        numbers = tuple(value)
        return tuple(sorted(numbers)) if any_order and all(type(n) is int for n in numbers) else numbers
    if kind is float and type(value) is int:
        return float(value)
    if kind is str and isinstance(value, os.PathLike):
        return os.fspath(value)
    if kind is Path and isinstance(value, str):
        return Path(value)
    return value


def parse(cls: type, field: Field[Any], text: str) -> Any:
    """Convert a command line's text to the option's value and check it."""
    kind, count = kind_of(cls, field.name), field.metadata["count"]
    if text == ALL and count is not None:
        if not (found := count()):
            raise UserError(f"{flag(name_of(field))} {ALL}: this machine has no GPU; leave the option out")
        return tuple(range(found))
    try:
        value: Any = tuple(map(int, text.split(","))) if kind is tuple else kind(text)
    except ValueError:
        value = text
    return check(cls, field, value)


def given_of(cls: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `given` options that are fields of the dataclass. An option whose value is None counts as
    not given.
    """
    return {
        field.name: value for field in options_of(cls) if (value := given.get(name_of(field))) is not None
    }


def from_given(cls: type[T], given: Mapping[str, Any]) -> T:
    """Return an instance of the dataclass from the `given` options. An option whose value is None counts as
    not given.
    """
    return cls(**given_of(cls, given))


def values_of(options: object, unlike: object = None) -> dict[str, Any]:
    """Return every option of a dataclass by its name on a command line.

    unlike: another instance of the class; only options that differ from it are shown
    """
    return {
        name_of(field): value
        for field in options_of(type(options))
        if (value := getattr(options, field.name)) != getattr(unlike, field.name, MISSING)
    }


def words_of(values: Mapping[str, Any]) -> list[str]:
    """Return options as words of a command line. Defaults are written too; options without a value are left
    out.
    """
    words = []
    for name, value in values.items():
        if isinstance(value, bool):
            words.append(flag(name) if value else flag("no_" + name))
        elif value is not None:
            words += [flag(name), text_of(value)]
    return words


def text_of(value: Any) -> str:
    """Format a value as on a command line: `1,2,4` for a tuple, `4` for 4.0."""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return repr(value).removesuffix(".0") if isinstance(value, float) else str(value)


def help_of(field: Field[Any], is_sized: bool = False) -> str:
    """Return the help of an option, with its default.

    is_sized: whether the default is computed from the workload
    """
    text, default, unless_given = field.metadata["help"], field.default, field.metadata["unless_given"]
    if is_sized:
        text, unless_given = f"{text.partition('; by default')[0].rstrip('.')}.", "what the workload needs"
    if unless_given is None and default is not None:
        unless_given = {True: "on", False: "off"}[default] if isinstance(default, bool) else text_of(default)
    return text if unless_given is None else f"{text}  [default: {unless_given}]"


def takes(*classes: type, sized: Collection[str] = ()) -> Callable[[F], F]:
    """Return a decorator for a function that ends in `**options`: it accepts the classes' options by name,
    and no others.

    The decorated function's signature and docstring name all these options. An unknown option raises
    UserError, with a name that is like it.

    sized: options that the function computes if they are not given
    """

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        parameters = list(signature.parameters.values())
        own = [parameter for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD]
        options = [parameter for cls in classes for parameter in _parameters(cls, sized)]
        named = [*own, *(option for option in options if option.name not in signature.parameters)]
        by_keyword = [each for each in named if each.kind is not each.POSITIONAL_ONLY]
        by_name = [each.name for each in by_keyword if each.name != "self"]
        renamed = {field.metadata["formerly"]: name_of(field) for cls in classes for field in options_of(cls)}

        @functools.wraps(function)
        def checked(*args: Any, **given: Any) -> Any:
            for name in given.keys() - set(by_name):
                if name in renamed:
                    raise UserError(f"{name} is called {renamed[name]} now")
                close = difflib.get_close_matches(name, by_name, 1)
                hint = f"did you mean {close[0]}? " if close else ""
                raise UserError(f"there is no option {name!r}; {hint}The options are: {', '.join(by_name)}")
            return function(*args, **given)

        checked.__signature__ = signature.replace(parameters=named)  # type: ignore[attr-defined]
        helps = [
            f"    {name_of(field)}: {help_of(field, field.name in sized)}"
            for cls in classes
            for field in options_of(cls)
        ]
        checked.__doc__ = "\n".join([inspect.getdoc(function) or "", "", "Options:", *helps])
        return cast(F, checked)

    return decorate


def _parameters(cls: type, sized: Collection[str]) -> list[inspect.Parameter]:
    parameters = []
    for field in options_of(cls):
        hint, default = typing.get_type_hints(cls)[field.name], field.default
        if kind_of(cls, field.name) is Path:
            hint = hint | str
        if field.name in sized or field.metadata["unless_given"]:
            hint, default = hint | None, None
        keyword = inspect.Parameter.KEYWORD_ONLY
        parameters.append(inspect.Parameter(name_of(field), keyword, default=default, annotation=hint))
    return parameters
