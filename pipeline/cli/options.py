"""Options of a command line, made from the fields of dataclasses; and the recipe, which two commands take.

Registered names are looked up only when they are shown or checked, because that imports torch.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import Field
from pathlib import Path
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from ...base.errors import UserError
from ...base.option_fields import flag, help_of, kind_of, name_of, options_of, parse
from ..quantization.options import DEFAULT_RECIPE

F = TypeVar("F", bound=Callable[..., Any])
RECIPES = Path(__file__).parent.parent / "recipes"
METAVARS = {int: "N", float: "X", str: "TEXT", Path: "FILE", tuple: "N,N,..."}


def completions(names: Iterable[str], incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]


class OptionType(click.ParamType):
    """The type of one field's values, checked by the dataclass."""

    def __init__(self, cls: type, field: Field[Any]):
        self.cls, self.field = cls, field
        self.name = field.name

    @property
    def words(self) -> list[str]:
        """The values that the user can give by name."""
        names = self.field.metadata["choices"] or self.field.metadata["suggestions"]
        return list(names()) if names else []

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        if words := self.words:
            return f"[{'|'.join(words)}]"
        return self.field.metadata["metavar"] or METAVARS[kind_of(self.cls, self.field.name)]

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return parse(self.cls, self.field, value) if isinstance(value, str) else value
        except UserError as error:
            self.fail(error.message, param, ctx)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        return completions(self.words, incomplete)


class RecipeWord(click.ParamType):
    """The name of a shipped recipe, or a recipe's file. The reader of the recipe finds out which of the two
    it is, and checks it.
    """

    name = "recipe"

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        shipped = completions(sorted(path.stem for path in RECIPES.glob("*.yaml")), incomplete)
        return shipped or [CompletionItem(incomplete, type="file")]


recipe_option = click.option(
    "--recipe",
    type=RecipeWord(),
    default=DEFAULT_RECIPE,
    show_default=True,
    help="A shipped recipe's name, or a YAML file.",
)


def options_from(
    *classes: type, sized: Collection[str] = (), only: Collection[str] | None = None
) -> Callable[[F], F]:
    """Return a decorator that gives a command an option for every field that is an option; an option that is
    not given is None.

    sized: options whose default is computed from the workload
    only:  the names of the options that the command has; None for all
    """
    chosen = [
        (cls, field) for cls in classes for field in options_of(cls) if only is None or name_of(field) in only
    ]

    def decorate(function: F) -> F:
        for cls, field in reversed(chosen):
            function = _option(cls, field, field.name in sized)(function)
            if former := field.metadata["formerly"]:
                function = _former_option(former, name_of(field))(function)
        return function

    return decorate


def _option(cls: type, field: Field[Any], is_sized: bool) -> Callable[[F], F]:
    name, text = name_of(field), help_of(field, is_sized)
    if isinstance(field.default, bool):
        return click.option(f"{flag(name)}/{flag('no_' + name)}", name, default=None, help=text)
    return click.option(flag(name), name, type=OptionType(cls, field), help=text)


def _former_option(former: str, name: str) -> Callable[[F], F]:
    """Warns that an option was called by its former name."""

    def refuse(context: click.Context, parameter: click.Parameter, value: str | None) -> None:
        if value is not None:
            raise click.UsageError(f"{flag(former)} is called {flag(name)} now", context)

    return click.option(flag(former), former, hidden=True, expose_value=False, callback=refuse)
