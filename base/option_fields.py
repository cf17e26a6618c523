"""Options said once, as fields of a dataclass: type, default, help, legal values. All else is made from them.

Not the options themselves (`engine/options.py` has the engine's), nor the command line (`pipeline/cli/`).
"""

import difflib
import functools
import inspect
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import Field, field, fields
from typing import Any, TypeVar, cast

from .errors import UserError

OptionValue = bool | int | str | tuple[int, ...] | None
F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
ALL = "all"
KINDS = {
    int: "a whole number",
    str: "a name",
    bool: "true or false",
    tuple: "distinct whole numbers, ascending",
}


def option(
    default: OptionValue,
    help: str,
    *,
    choices: Callable[[], Iterable[str]] | None = None,
    minimum: int | None = None,
    count: Callable[[], int] | None = None,
) -> Any:
    """A field that is an option.

    choices: asked only where they are shown, or a value other than the default is checked; a registry's names
             then hold what plugins have registered
    minimum: of a whole number, or of each of several
    count:   how many there are here, where a command line may say `all` of them, numbered from 0
    """
    metadata = {"help": help, "choices": choices, "minimum": minimum, "count": count}
    return field(default=default, metadata=metadata)


def flag(name: str) -> str:
    """`--max-num-seqs` for max_num_seqs."""
    return "--" + name.replace("_", "-")


def kind_of(cls: type, name: str) -> type:
    """int, str, bool or tuple: what the option holds where it is not None."""
    hint = typing.get_type_hints(cls)[name]
    if isinstance(hint, types.UnionType):
        [hint] = [part for part in typing.get_args(hint) if part is not types.NoneType]
    origin = typing.get_origin(hint) or hint
    return str if origin is typing.Literal else origin


def check(cls: type, one: Field[Any], value: Any) -> OptionValue:
    """`value` as the option holds it. UserError saying what it must be, in place of anything else."""
    if type(value) is type(one.default) and value == one.default:
        return cast(OptionValue, value)
    kind = kind_of(cls, one.name)
    if kind is tuple and isinstance(value, Sequence) and not isinstance(value, str):
        value = tuple(value)
        right = all(type(each) is int for each in value) and list(value) == sorted(set(value)) and value
    else:
        right = type(value) is kind
    minimum, choices = one.metadata.get("minimum"), one.metadata.get("choices")
    must = KINDS[kind] + ("" if minimum is None else f", at least {minimum}")
    low = minimum is not None and right and min(value if kind is tuple else (value,)) < minimum
    if not right or low:
        raise UserError(f"{one.name} is {value!r}; it must be {must}")
    if choices is not None and value not in (valid := list(choices())):
        raise UserError(f"unknown {one.name} {value!r}; choose one of: {', '.join(valid)}")
    return value


def parse(cls: type, one: Field[Any], text: str) -> OptionValue:
    """What a command line says, checked."""
    kind, count = kind_of(cls, one.name), one.metadata.get("count")
    if text == ALL and count is not None:
        if not (found := count()):
            raise UserError(f"{flag(one.name)} {ALL}: there are none here; leave it out")
        return tuple(range(found))
    try:
        value: Any = tuple(map(int, text.split(","))) if kind is tuple else kind(text)
    except ValueError:
        value = text
    return check(cls, one, value)


def from_given(cls: type[T], given: Mapping[str, Any]) -> T:
    """The dataclass with the options that are given. None stands for not given, whatever the default is."""
    return cls(**{name: value for name, value in given.items() if value is not None})


def words_of(values: Mapping[str, OptionValue]) -> list[str]:
    """Options as words of a command line: all that have a value, defaults too."""
    words = []
    for name, value in values.items():
        if isinstance(value, bool):
            words.append(flag(name) if value else flag("no_" + name))
        elif value is not None:
            text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
            words += [flag(name), text]
    return words


def takes(*classes: type, sized: Iterable[str] = ()) -> Callable[[F], F]:
    """For a function that ends in `**options`: it takes the classes' fields, by name, and no others.

    Its signature, as help() shows it, names them. UserError for an unknown one, with a name that is like it.

    sized: those that the function works out where they are not given
    """

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        own = [one for one in signature.parameters.values() if one.kind is not one.VAR_KEYWORD]
        options = {name: one for cls in classes for name, one in _parameters(cls, sized).items()}
        named = [*own, *(one for name, one in options.items() if name not in signature.parameters)]
        by_name = [one.name for one in named if one.kind is not one.POSITIONAL_ONLY and one.name != "self"]

        @functools.wraps(function)
        def checked(*args: Any, **given: Any) -> Any:
            for name in given.keys() - set(by_name):
                close = difflib.get_close_matches(name, by_name, 1)
                hint = f"did you mean {close[0]}? " if close else ""
                raise UserError(f"there is no option {name!r}; {hint}The options are: {', '.join(by_name)}")
            return function(*args, **given)

        checked.__signature__ = signature.replace(parameters=named)  # type: ignore[attr-defined]
        return cast(F, checked)

    return decorate


def _parameters(cls: type, sized: Iterable[str]) -> dict[str, inspect.Parameter]:
    parameters = {}
    for one in fields(cls):
        hint, default = typing.get_type_hints(cls)[one.name], one.default
        if one.name in sized:
            hint, default = hint | None, None
        parameters[one.name] = inspect.Parameter(
            one.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint
        )
    return parameters
