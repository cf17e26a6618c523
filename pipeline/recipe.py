"""Recipes: a YAML file that says how each linear layer is quantized, read and checked line by line.

Not for applying one to a model; `quantization/tasks.py` does that.
"""

import difflib
import fnmatch
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from ..layouts.errors import UserError
from ..serving_check.settings import Bounds

RECIPE_FOLDER = Path(__file__).parent / "recipes"
FORMATS = ("int4",)
ZERO_POINTS = ("integer", "fractional")
KEEP, QUANTIZE = "keep", "quantize"
GROUP_MULTIPLE = 16
REGEX_PREFIX = "re:"


@dataclass(frozen=True)
class Rule:
    """What one pattern of modules gets instead of the recipe's defaults; the first rule that matches wins."""

    modules: str
    """A shell pattern over module names (`*.down_proj`), or `re:` and a regular expression."""
    group_size: int | None = None
    ignore: bool = False


@dataclass(frozen=True)
class Recipe:
    """How a checkpoint is quantized. Every linear layer of the decoder is, unless a field says otherwise."""

    name: str = ""
    """The shipped recipe's name, or the file's without its suffix."""
    description: str = ""
    format: str = "int4"
    group_size: int = 128
    """Consecutive weights of a row that share a scale and a zero point."""
    symmetric: bool = False
    """One zero point, 8, for all."""
    zero_point: str = "integer"
    """`fractional` is torchao's own HQQ: only `--export torchao` can store it."""
    include: tuple[str, ...] = ()
    """Patterns of the modules to quantize; none means all."""
    ignore: tuple[str, ...] = ()
    """Patterns of modules to keep as they are."""
    rules: tuple[Rule, ...] = ()
    lm_head: str = KEEP
    """`quantize` unties it where it is tied: it gets a 4-bit copy of its own, the embeddings stay."""
    embeddings: str = KEEP
    """`quantize` is for Scalegate's own server: other engines refuse 4-bit embeddings."""
    bounds: dict[str, float] = field(default_factory=dict)
    """The gate's bounds that this recipe changes, as `serving_check.settings.Bounds` names them."""

    def to_json(self) -> dict[str, Any]:
        """The recipe as its YAML would say it, defaults included and bounds at the top level."""
        value: dict[str, Any] = {
            f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("bounds", "rules")
        }
        value["include"], value["ignore"] = list(self.include), list(self.ignore)
        value["rules"] = [
            {"modules": rule.modules} | ({"ignore": True} if rule.ignore else {"group_size": rule.group_size})
            for rule in self.rules
        ]
        return value | self.bounds


def matches(pattern: str, module: str) -> bool:
    """Whether a recipe's pattern names `module`; `*` spans dots."""
    if pattern.startswith(REGEX_PREFIX):
        return re.fullmatch(pattern.removeprefix(REGEX_PREFIX), module) is not None
    return fnmatch.fnmatchcase(module, pattern)


def shipped_recipes() -> list[str]:
    return sorted(path.stem for path in RECIPE_FOLDER.glob("*.yaml"))


def load_recipe(recipe: str | Path | Recipe) -> Recipe:
    """A shipped recipe by name, or one from a YAML file. UserError says what is wrong and on which line."""
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
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the recipe {path}: {error}") from error
    return _Reader(path).recipe(text)


class _Reader:
    """Turns one YAML document into a Recipe; it keeps the file's name for its errors."""

    def __init__(self, path: Path):
        self.path = path

    def recipe(self, text: str) -> Recipe:
        try:
            node = yaml.compose(text, Loader=yaml.SafeLoader)
            value = yaml.safe_load(text)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
            raise UserError(
                f"{self.path}{where}: not valid YAML: {error.problem or error.context}"
            ) from error
        except yaml.YAMLError as error:
            raise UserError(f"{self.path}: not valid YAML: {error}") from error
        if not isinstance(node, yaml.MappingNode):
            raise UserError(f"{self.path}: a recipe is a mapping of keys to values, such as `format: int4`")
        bound_names = [f.name for f in fields(Bounds)]
        recipe_names = [f.name for f in fields(Recipe) if f.name != "bounds"]
        lines = self._check_keys(node, recipe_names + bound_names, "")
        if value.get("name") is None:
            value["name"] = self.path.stem
        bounds = {name: value[name] for name in bound_names if name in value}
        for name in bounds:
            try:
                Bounds.from_recipe({name: bounds[name]})
            except UserError as error:
                raise self._error(lines[name], error.message) from error
        return Recipe(
            name=self._text(value, "name", lines),
            description=self._text(value, "description", lines),
            format=self._choice(value, "format", FORMATS, lines),
            group_size=self._group_size(value.get("group_size", 128), lines.get("group_size")),
            symmetric=self._flag(value, "symmetric", lines),
            zero_point=self._zero_point(value, lines),
            include=self._patterns(value, "include", lines),
            ignore=self._patterns(value, "ignore", lines),
            rules=self._rules(node, value.get("rules"), lines.get("rules")),
            lm_head=self._choice(value, "lm_head", (KEEP, QUANTIZE), lines),
            embeddings=self._choice(value, "embeddings", (KEEP, QUANTIZE), lines),
            bounds={name: float(bound) for name, bound in bounds.items()},
        )

    def _check_keys(self, node: yaml.MappingNode, known: list[str], where: str) -> dict[str, int]:
        """Each key's line; UserError for one that is unknown or there twice."""
        lines: dict[str, int] = {}
        for key_node, _ in node.value:
            key, line = str(key_node.value), key_node.start_mark.line + 1
            if key not in known:
                close = difflib.get_close_matches(key, known, n=1)
                hint = f"did you mean {close[0]!r}? " if close else ""
                raise self._error(line, f"unknown key {key!r}{where}; {hint}Valid keys: {', '.join(known)}")
            if key in lines:
                raise self._error(line, f"key {key!r}{where} is there twice (first on line {lines[key]})")
            lines[key] = line
        return lines

    def _rules(self, node: yaml.MappingNode, values: Any, line: int | None) -> tuple[Rule, ...]:
        if values is None:
            return ()
        (rules_node,) = (value for key, value in node.value if key.value == "rules")
        if not isinstance(rules_node, yaml.SequenceNode):
            raise self._error(line, "`rules` is a list of rules, each with `modules` and what those get")
        return tuple(
            self._rule(item_node, value) for item_node, value in zip(rules_node.value, values, strict=True)
        )

    def _rule(self, node: yaml.Node, value: Any) -> Rule:
        line = node.start_mark.line + 1
        if not isinstance(node, yaml.MappingNode):
            raise self._error(line, "a rule is a mapping with `modules` and `group_size` or `ignore`")
        lines = self._check_keys(node, [f.name for f in fields(Rule)], " in a rule")
        (pattern,) = self._patterns({"modules": value.get("modules") or []}, "modules", lines) or (None,)
        if pattern is None:
            raise self._error(line, "a rule needs `modules`, the pattern of the modules it is for")
        ignore = self._flag(value, "ignore", lines)
        if ignore == ("group_size" in value):
            raise self._error(line, f"the rule for {pattern!r} needs either `group_size` or `ignore: true`")
        size = None if ignore else self._group_size(value["group_size"], lines["group_size"])
        return Rule(pattern, size, ignore)

    def _patterns(self, value: Mapping[str, Any], key: str, lines: dict[str, int]) -> tuple[str, ...]:
        patterns = value.get(key) or []
        if isinstance(patterns, str):
            patterns = [patterns]
        if not isinstance(patterns, list) or not all(isinstance(p, str) and p for p in patterns):
            raise self._error(lines.get(key), f"`{key}` is a list of module patterns, such as `*.down_proj`")
        for pattern in patterns:
            if pattern.startswith(REGEX_PREFIX):
                try:
                    re.compile(pattern.removeprefix(REGEX_PREFIX))
                except re.error as error:
                    raise self._error(
                        lines.get(key), f"{pattern!r} is not a valid expression: {error}"
                    ) from error
        return tuple(patterns)

    def _group_size(self, value: Any, line: int | None) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < GROUP_MULTIPLE:
            raise self._error(line, f"`group_size` is a whole number of at least 16, not {value!r}")
        if value % GROUP_MULTIPLE:
            raise self._error(line, f"`group_size` is a multiple of {GROUP_MULTIPLE}, not {value}")
        return value

    def _zero_point(self, value: Mapping[str, Any], lines: dict[str, int]) -> str:
        zero_point = self._choice(value, "zero_point", ZERO_POINTS, lines)
        if zero_point == "fractional" and value.get("symmetric"):
            raise self._error(
                lines["zero_point"], "`zero_point: fractional` and `symmetric: true` exclude each other"
            )
        return zero_point

    def _choice(
        self, value: Mapping[str, Any], key: str, choices: tuple[str, ...], lines: dict[str, int]
    ) -> str:
        chosen = value.get(key, getattr(Recipe, key))
        if chosen not in choices:
            raise self._error(lines.get(key), f"`{key}` is one of {', '.join(choices)}; not {chosen!r}")
        return chosen

    def _flag(self, value: Mapping[str, Any], key: str, lines: dict[str, int]) -> bool:
        flag = value.get(key, False)
        if not isinstance(flag, bool):
            raise self._error(lines.get(key), f"`{key}` is true or false, not {flag!r}")
        return flag

    def _text(self, value: Mapping[str, Any], key: str, lines: dict[str, int]) -> str:
        text = value.get(key, "")
        if not isinstance(text, str):
            raise self._error(lines.get(key), f"`{key}` is text, not {text!r}")
        return text.strip()

    def _error(self, line: int | None, what: str) -> UserError:
        return UserError(f"{self.path}{f', line {line}' if line else ''}: {what}")
