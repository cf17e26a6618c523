"""The engine's options on a command line, from the fields of EngineOptions; and choices out of registries.

What is registered is asked for only where it is shown, or a word is checked against it: that imports torch.
"""

from collections.abc import Callable, Iterable
from dataclasses import Field, fields
from pathlib import Path
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from ...base.errors import UserError
from ...base.option_fields import flag, kind_of, parse
from ...serving_check.engine.options import EngineOptions

F = TypeVar("F", bound=Callable[..., Any])
RECIPES = Path(__file__).parent.parent / "recipes"
METAVARS = {int: "N", str: "TEXT", tuple: "N,N,..."}


def completions(names: Iterable[str], incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]


class OptionType(click.ParamType):
    """One field's values, checked as the dataclass checks them."""

    def __init__(self, cls: type, one: Field[Any]):
        self.cls, self.field = cls, one
        self.name = one.name

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        choices = self.field.metadata["choices"]
        return f"[{'|'.join(choices())}]" if choices else METAVARS[kind_of(self.cls, self.field.name)]

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return parse(self.cls, self.field, value) if isinstance(value, str) else value
        except UserError as error:
            self.fail(error.message, param, ctx)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        choices = self.field.metadata["choices"]
        return completions(choices() if choices else (), incomplete)


class Registered(click.ParamType):
    """A name out of a registry."""

    name = "name"

    def __init__(self, names: Callable[[], Iterable[str]]):
        self.names = names

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return f"[{'|'.join(self.names())}]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if param is not None and value == param.default:
            return value
        if value not in (names := list(self.names())):
            self.fail(f"{value!r} is none of: {', '.join(names)}", param, ctx)
        return value

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        return completions(self.names(), incomplete)


class RecipeWord(click.ParamType):
    """A shipped recipe's name, or a file: which, and whether it holds, is found by who reads it."""

    name = "recipe"

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        shipped = completions(sorted(path.stem for path in RECIPES.glob("*.yaml")), incomplete)
        return shipped or [CompletionItem(incomplete, type="file")]


class EngineWord(click.ParamType):
    """A word after `--engine`: the engine itself is found by those who start it."""

    name = "engine"

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        from ...serving_check.adapters.all_engines import ENGINES

        return f"[{'|'.join(ENGINES)}]"

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        from ...serving_check.adapters.all_engines import ENGINES

        return completions(ENGINES, incomplete)


def exports() -> Iterable[str]:
    from ..conventions.all_conventions import EXPORTS

    return EXPORTS


def engine_options(cls: type = EngineOptions, sized: Iterable[str] = ()) -> Callable[[F], F]:
    """A decorator for a command: an option for every field; one that is not given is None.

    sized: those whose default is worked out from the workload
    """
    sized = frozenset(sized)

    def decorate(function: F) -> F:
        for one in reversed(fields(cls)):
            function = _option(cls, one, one.name in sized)(function)
        return function

    return decorate


def _option(cls: type, one: Field[Any], sized: bool) -> Callable[[F], F]:
    text, default = one.metadata["help"], one.default
    if sized:
        text = f"{text.partition('; default')[0].rstrip('.')}; default what the workload needs."
    if isinstance(default, bool):
        names = f"{flag(one.name)}/{flag('no_' + one.name)}"
        shown = flag(one.name if default else "no_" + one.name).removeprefix("--")
        return click.option(names, one.name, default=None, help=f"{text}  [default: {shown}]")
    if default is not None and not sized:
        text += f"  [default: {default}]"
    return click.option(flag(one.name), one.name, type=OptionType(cls, one), help=text)
