"""Reading recipes: shipped ones by name, others from YAML files, each mistake with its file and line.

`recipe_fields.py` describes the values of each field, by the types that `Recipe` gives its fields.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from ...base.errors import UserError
from ...base.untrusted_files import read_outside
from ...layouts.formats.all_formats import WEIGHT_FORMATS
from ...layouts.formats.unquantized import Unquantized
from ...layouts.formats.weight_format import WeightFormat, parameter_names
from ...serving_check.gate.policy import declarable
from ...serving_check.settings import checked_bound
from .recipe import DEFAULT_SPEC, Recipe, Rule, is_file_name
from .recipe_fields import Flag, Format, Pattern
from .yaml_lines import Place, YamlLines

T = TypeVar("T")

RECIPE_FOLDER = Path(__file__).parents[1] / "recipes"
MAX_RECIPE_BYTES = 1 << 16
RULE_KEYS = ("modules", "ignore", "format")


def shipped_recipes() -> list[str]:
    return sorted(path.stem for path in RECIPE_FOLDER.glob("*.yaml"))


def is_recipe(name: str) -> bool:
    """Say whether `name` is a shipped recipe or a recipe's file."""
    return name in shipped_recipes() or Path(name).expanduser().is_file()


def load_recipe(recipe: str | Path | Recipe) -> Recipe:
    """Return a shipped recipe by name, or a YAML file's recipe. A UserError says what is wrong, and on which
    line.
    """
    if isinstance(recipe, Recipe):
        return recipe
    if str(recipe) in shipped_recipes():
        path = RECIPE_FOLDER / f"{recipe}.yaml"
    else:
        path = Path(recipe).expanduser()
        if not path.is_file():
            raise UserError(
                f"unknown recipe {str(recipe)!r}: it is neither a file nor one of: "
                f"{', '.join(shipped_recipes())}"
            )
    try:
        text = read_outside(path, MAX_RECIPE_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the recipe {path}: {error}") from error
    expectation = "a recipe is a mapping of keys to values, such as `format: int4`"
    return _recipe(YamlLines.parse(path, text, MAX_RECIPE_BYTES, expectation))


@dataclass(frozen=True)
class _FormatKey:
    """The `format` key of a mapping, which is read before the format's parameters are known."""

    format: Format = DEFAULT_SPEC.name


@dataclass(frozen=True)
class _RuleKeys:
    """A rule's keys besides its format's parameters."""

    modules: Pattern | None = None
    ignore: Flag = False


_RECIPE: TypeAdapter[Recipe] = TypeAdapter(Recipe)
_FORMAT: TypeAdapter[_FormatKey] = TypeAdapter(_FormatKey)
_RULE: TypeAdapter[_RuleKeys] = TypeAdapter(_RuleKeys)


def _recipe(file: YamlLines) -> Recipe:
    chosen = _format(file, (), file.values)
    file.require_keys((), [*_recipe_keys(chosen), *declarable()])
    parameters = parameter_names(chosen)
    spec = _spec(file, (), chosen, {name: file.values[name] for name in parameters if name in file.values})
    others = {key: value for key, value in file.values.items() if key not in ("format", *parameters)}
    bounds = {name: _bound(file, name, others.pop(name)) for name in declarable() if name in others}
    if others.get("name") is None:
        others["name"] = file.path.stem
    others["rules"] = _rules(file, spec, others.get("rules"))
    recipe = _checked(_RECIPE, file, (), {**others, "spec": spec, "bounds": bounds})
    return replace(recipe, calibration=_from_folder(recipe.calibration, file.path.parent))


def _recipe_keys(chosen: type[WeightFormat]) -> list[str]:
    """Return a recipe's keys but for bounds, in the order of its fields: `spec` is `format` and its
    parameters.
    """
    names = [field.name for field in fields(Recipe) if field.name != "bounds"]
    index = names.index("spec")
    return [*names[:index], "format", *parameter_names(chosen), *names[index + 1 :]]


def _from_folder(calibration: str, folder: Path) -> str:
    """Return a calibration text's name; the path of a file gets the recipe's folder in front."""
    if not calibration or not is_file_name(calibration):
        return calibration
    return str(folder / Path(calibration).expanduser())


def _rules(file: YamlLines, recipe_spec: WeightFormat, rules: Any) -> tuple[Rule, ...]:
    if rules is None:
        return ()
    if not isinstance(rules, list):
        raise file.error(("rules",), "`rules` is a list of rules, each with `modules` and what those get")
    return tuple(_rule(file, ("rules", index), recipe_spec, rule) for index, rule in enumerate(rules))


def _rule(file: YamlLines, place: Place, recipe_spec: WeightFormat, rule: Any) -> Rule:
    if not isinstance(rule, dict):
        raise file.error(place, "a rule is a mapping with `modules` and `format`, parameters or `ignore`")
    chosen = _format(file, place, rule) if "format" in rule else type(recipe_spec)
    names = parameter_names(chosen)
    file.require_keys(place, [*RULE_KEYS, *names], " in a rule")
    keys = _checked(_RULE, file, place, rule)
    if keys.modules is None:
        raise file.error(place, "a rule needs `modules`, the pattern of the modules it is for")
    given = {name: rule[name] for name in names if name in rule}
    if keys.ignore == ("format" in rule or bool(given)):
        parameters = f", parameters of {chosen.name} ({', '.join(names)})" if names else ""
        raise file.error(
            place, f"the rule for {keys.modules!r} needs either `format`{parameters} or `ignore: true`"
        )
    if keys.ignore:
        return Rule(keys.modules, Unquantized())
    make = chosen if "format" in rule else partial(replace, recipe_spec)  # type: ignore[type-var]
    return Rule(keys.modules, _spec(file, place, make, given))


def _format(file: YamlLines, place: Place, mapping: dict[str, Any]) -> type[WeightFormat]:
    named = {key: value for key, value in mapping.items() if key == "format"}
    return WEIGHT_FORMATS[_checked(_FORMAT, file, place, named).format]


def _spec(
    file: YamlLines, place: Place, make: Callable[..., WeightFormat], given: dict[str, Any]
) -> WeightFormat:
    """Return `make` called with the parameters that the mapping at `place` gives."""
    try:
        return make(**given)
    except (TypeError, ValueError) as error:
        wrong = [name for name in given if f"`{name}" in str(error)] or list(given)
        raise file.error((*place, wrong[0]), str(error)) from error


def _bound(file: YamlLines, name: str, value: Any) -> float:
    try:
        return checked_bound(name, value)
    except UserError as error:
        raise file.error((name,), error.message) from error


def _checked(adapter: TypeAdapter[T], file: YamlLines, place: Place, values: Any) -> T:
    """Return `values` of the mapping at `place`, converted to the adapter's type."""
    try:
        return adapter.validate_python(values)
    except ValidationError as error:
        first = error.errors()[0]
        message = str(first["ctx"]["error"]) if first["type"] == "value_error" else first["msg"]
        raise file.error((*place, *first["loc"]), message) from error
