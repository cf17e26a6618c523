"""Recipes: a YAML file that says how each linear layer is quantized, read and checked line by line.

Not for applying one to a model; `quantization/tasks.py` does that.
"""

import difflib
import fnmatch
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from ...base.batch_invariance import INVARIANCE_MODES, TUNED
from ...base.errors import UserError
from ...base.untrusted_files import parse_yaml, read_outside
from ...base.untrusted_names import name_refusal
from ...layouts.formats.all_formats import WEIGHT_FORMATS
from ...layouts.formats.int4 import Int4
from ...layouts.formats.unquantized import Unquantized
from ...layouts.formats.weight_format import WeightFormat, parameter_names, spec_to_json
from ...layouts.kv.format import KV_FORMATS
from ...serving_check.engine.options import UNQUANTIZED
from ...serving_check.evidence.artifact_figures import PARTS
from ...serving_check.gate.policy import declarable, declared_by
from .name_patterns import compiled, full_match

RECIPE_FOLDER = Path(__file__).parents[1] / "recipes"
KEEP, QUANTIZE = "keep", "quantize"
DATA_FREE, GPTQ, AWQ, AWQ_GPTQ = "data-free", "gptq", "awq", "awq-gptq"
METHODS = (DATA_FREE, GPTQ, AWQ, AWQ_GPTQ)
DEFAULT_SPEC = Int4()
REGEX_PREFIX = "re:"
SELF, HUB = "self", "hub:"
"""Where a calibration text comes from, if not from a file: `self`, or `hub:` and a data set's name."""
MAX_RECIPE_BYTES = 1 << 16
MAX_TEXT = 1000
"""Characters of a name or a description."""
MAX_PATTERNS = 256
MAX_STEPS = 100_000
RULE_KEYS = ("modules", "ignore", "format")


@dataclass(frozen=True)
class Rule:
    """What one pattern of modules gets instead of the recipe's format; the first rule that matches wins.

    In YAML a rule has `format`, with that format's parameters; or parameters alone, which change the recipe's
    own format; or `ignore: true`, which is short for `format: unquantized`.
    """

    modules: str
    """A shell pattern over module names (`*.down_proj`), or `re:` and a regular expression."""
    spec: WeightFormat
    reason: str = ""
    """Why the modules stay unquantized, where it is not the recipe's author who says so; not in YAML."""


@dataclass(frozen=True)
class Recipe:
    """How a checkpoint is quantized. Every linear layer of the decoder is, unless a field says otherwise."""

    name: str = ""
    """The shipped recipe's name, or the file's without its suffix."""
    description: str = ""
    spec: WeightFormat = DEFAULT_SPEC
    """In YAML: `format`, and its parameters beside it."""
    method: str = DATA_FREE
    """How weights are rounded: each by itself, or with the layer's inputs on a text in view: `gptq`
    (`quantization/second_order.py`), `awq` (`quantization/equalization.py`), or both."""
    learned_rounding: int = 0
    """For how many steps each layer's rounding is learned after that (`quantization/learned_rounding.py`)."""
    calibration: str = ""
    """The text for what reads one: a file, by its path from the recipe's folder, `hub:OWNER/NAME`, or `self`
    for what the model itself writes, which a recipe that needs a text and names none gets."""
    include: tuple[str, ...] = ()
    """Patterns of the modules to quantize; none means all."""
    ignore: tuple[str, ...] = ()
    """Patterns of modules to keep as they are."""
    rules: tuple[Rule, ...] = ()
    lm_head: str = KEEP
    """`quantize` unties it where it is tied: it gets a quantized copy of its own, the embeddings stay."""
    embeddings: str = KEEP
    """`quantize` is for Scalegate's own server: other engines refuse quantized embeddings."""
    kv_cache: str = UNQUANTIZED
    """How keys and values are stored while it is served, a name in `KV_FORMATS`. With `format: unquantized`
    the weights stay as they are."""
    batch_invariance: str = TUNED
    """What a request's bits may depend on when served (`base/batch_invariance.py`); the gate proves it."""
    rival: str = ""
    """Another recipe, by name or file: what is made by this one must be faster than what is made by that."""
    files: tuple[str, ...] = ()
    """Shell patterns of files that travel with the weights besides those of known kinds, by relative path."""
    changes: tuple[str, ...] = ()
    """Parts of the tokenizer, the templates and the generation settings that are meant to differ from the
    baseline's, as `serving_check.artifact_figures.PARTS` names them."""
    bounds: dict[str, float] = field(default_factory=dict)
    """The gate's bounds (`serving_check.settings.Bounds`) and the release policy's settings
    (`serving_check.policy.ReleasePolicy`) that this recipe changes, under their names there."""

    def to_json(self) -> dict[str, Any]:
        """The recipe as its YAML would say it beside its text: with defaults, and bounds at the top level."""
        return {
            "name": self.name,
            "description": self.description,
            **spec_to_json(self.spec),
            **({"method": self.method} if self.method != DATA_FREE else {}),
            **({"learned_rounding": self.learned_rounding} if self.learned_rounding else {}),
            **({"calibration": calibration_name(self.calibration)} if self.calibration else {}),
            "include": list(self.include),
            "ignore": list(self.ignore),
            "rules": [{"modules": rule.modules} | spec_to_json(rule.spec) for rule in self.rules],
            "lm_head": self.lm_head,
            "embeddings": self.embeddings,
            **({"kv_cache": self.kv_cache} if self.kv_cache != UNQUANTIZED else {}),
            **({"batch_invariance": self.batch_invariance} if self.batch_invariance != TUNED else {}),
            **({"rival": self.rival} if self.rival else {}),
            **({"files": list(self.files)} if self.files else {}),
            **({"changes": list(self.changes)} if self.changes else {}),
            **self.bounds,
        }


def matches(pattern: str, module: str) -> bool:
    """Whether a recipe's pattern names `module`; `*` spans dots."""
    if pattern.startswith(REGEX_PREFIX):
        return full_match(pattern.removeprefix(REGEX_PREFIX), module)
    return fnmatch.fnmatchcase(module, pattern)


def calibration_name(source: str) -> str:
    """What a published record calls a calibration text: of a file its name alone, without folders."""
    return Path(source).name if _is_file_name(source) else source


def _is_file_name(source: str) -> bool:
    return source != SELF and not source.startswith(HUB)


def shipped_recipes() -> list[str]:
    return sorted(path.stem for path in RECIPE_FOLDER.glob("*.yaml"))


def is_recipe(name: str) -> bool:
    """Whether it names a shipped recipe, or is a recipe's file."""
    return name in shipped_recipes() or Path(name).expanduser().is_file()


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
        text = read_outside(path, MAX_RECIPE_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the recipe {path}: {error}") from error
    return _Reader(path).recipe(text)


class _Reader:
    """Turns one YAML document into a Recipe; it keeps the file's name for its errors."""

    def __init__(self, path: Path):
        self.path = path

    def recipe(self, text: str) -> Recipe:
        value = parse_yaml(text, str(self.path), yaml.SafeLoader, MAX_RECIPE_BYTES)
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if not isinstance(node, yaml.MappingNode):
            raise UserError(f"{self.path}: a recipe is a mapping of keys to values, such as `format: int4`")
        chosen = self._format(value.get("format", DEFAULT_SPEC.name), _line_of(node, "format"))
        bound_names = declarable()
        lines = self._check_keys(node, [*_recipe_keys(chosen), *bound_names], "")
        if value.get("name") is None:
            value["name"] = self.path.stem
        bounds = {name: value[name] for name in bound_names if name in value}
        for name in bounds:
            try:
                declared_by({name: bounds[name]})
            except UserError as error:
                raise self._error(lines[name], error.message) from error
        spec = self._spec(chosen, parameter_names(chosen), value, lines)
        return Recipe(
            name=self._text(value, "name", lines),
            description=self._text(value, "description", lines),
            spec=spec,
            method=self._choice(value, "method", lines, METHODS),
            learned_rounding=self._steps(value, "learned_rounding", lines),
            calibration=self._calibration(value, lines),
            include=self._patterns(value, "include", lines),
            ignore=self._patterns(value, "ignore", lines),
            rules=self._rules(spec, node, value.get("rules"), lines.get("rules")),
            lm_head=self._choice(value, "lm_head", lines),
            embeddings=self._choice(value, "embeddings", lines),
            kv_cache=self._kv_cache(value, lines),
            batch_invariance=self._choice(value, "batch_invariance", lines, INVARIANCE_MODES),
            rival=self._text(value, "rival", lines),
            files=self._files(value, lines),
            changes=self._changes(value, lines),
            bounds={name: float(bound) for name, bound in bounds.items()},
        )

    def _format(self, name: Any, line: int | None) -> type[WeightFormat]:
        if not isinstance(name, str) or name not in WEIGHT_FORMATS:
            raise self._error(line, f"`format` is one of {', '.join(sorted(WEIGHT_FORMATS))}; not {name!r}")
        return WEIGHT_FORMATS[name]

    def _spec(
        self,
        make: Callable[..., WeightFormat],
        names: list[str],
        value: Mapping[str, Any],
        lines: Mapping[str, int],
    ) -> WeightFormat:
        """`make` called with those of the parameters `names` that the file gives."""
        given = {name: value[name] for name in names if name in value}
        try:
            return make(**given)
        except (TypeError, ValueError) as error:
            about = [name for name in given if f"`{name}" in str(error)] or list(given)
            raise self._error(lines[about[0]], str(error)) from error

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

    def _rules(
        self, spec: WeightFormat, node: yaml.MappingNode, values: Any, line: int | None
    ) -> tuple[Rule, ...]:
        if values is None:
            return ()
        (rules_node,) = (value for key, value in node.value if key.value == "rules")
        if not isinstance(rules_node, yaml.SequenceNode):
            raise self._error(line, "`rules` is a list of rules, each with `modules` and what those get")
        return tuple(
            self._rule(spec, item_node, value)
            for item_node, value in zip(rules_node.value, values, strict=True)
        )

    def _rule(self, spec: WeightFormat, node: yaml.Node, value: Any) -> Rule:
        """One rule of a recipe whose own format is `spec`."""
        line = node.start_mark.line + 1
        if not isinstance(node, yaml.MappingNode):
            raise self._error(line, "a rule is a mapping with `modules` and `format`, parameters or `ignore`")
        chosen = type(spec)
        if "format" in value:
            chosen = self._format(value["format"], _line_of(node, "format"))
        names = parameter_names(chosen)
        lines = self._check_keys(node, [*RULE_KEYS, *names], " in a rule")
        (pattern,) = self._patterns({"modules": value.get("modules") or []}, "modules", lines) or (None,)
        if pattern is None:
            raise self._error(line, "a rule needs `modules`, the pattern of the modules it is for")
        ignore = self._flag(value, "ignore", lines)
        if ignore == any(name in value for name in ("format", *names)):
            parameters = f", parameters of {chosen.name} ({', '.join(names)})" if names else ""
            raise self._error(
                line, f"the rule for {pattern!r} needs either `format`{parameters} or `ignore: true`"
            )
        if ignore:
            return Rule(pattern, Unquantized())
        make = chosen if "format" in value else partial(replace, spec)  # type: ignore[type-var]
        return Rule(pattern, self._spec(make, names, value, lines))

    def _patterns(self, value: Mapping[str, Any], key: str, lines: dict[str, int]) -> tuple[str, ...]:
        patterns = value.get(key) or []
        if isinstance(patterns, str):
            patterns = [patterns]
        if not isinstance(patterns, list) or not all(isinstance(p, str) and p for p in patterns):
            raise self._error(lines.get(key), f"`{key}` is a list of module patterns, such as `*.down_proj`")
        if len(patterns) > MAX_PATTERNS:
            raise self._error(
                lines.get(key), f"`{key}` has more than {MAX_PATTERNS} patterns; use wider ones"
            )
        for pattern in patterns:
            if pattern.startswith(REGEX_PREFIX):
                try:
                    compiled(pattern.removeprefix(REGEX_PREFIX))
                except UserError as error:
                    raise self._error(lines.get(key), error.message) from error
        return tuple(patterns)

    def _files(self, value: Mapping[str, Any], lines: dict[str, int]) -> tuple[str, ...]:
        patterns = value.get("files") or []
        if isinstance(patterns, str):
            patterns = [patterns]
        if not isinstance(patterns, list) or any(name_refusal(pattern) is not None for pattern in patterns):
            raise self._error(
                lines.get("files"), "`files` is a list of patterns of files inside the source, such as `*.py`"
            )
        return tuple(patterns)

    def _changes(self, value: Mapping[str, Any], lines: dict[str, int]) -> tuple[str, ...]:
        parts = value.get("changes") or []
        if not isinstance(parts, list) or not set(map(str, parts)) <= set(PARTS):
            raise self._error(
                lines.get("changes"),
                f"`changes` is a list of what differs on purpose, from: {', '.join(PARTS)}",
            )
        return tuple(parts)

    def _choice(
        self,
        value: Mapping[str, Any],
        key: str,
        lines: dict[str, int],
        choices: tuple[str, ...] = (KEEP, QUANTIZE),
    ) -> str:
        """One of `choices`, the first of them where the file says nothing."""
        chosen = value.get(key, choices[0])
        if chosen not in choices:
            raise self._error(lines.get(key), f"`{key}` is one of {', '.join(choices)}; not {chosen!r}")
        return chosen

    def _kv_cache(self, value: Mapping[str, Any], lines: dict[str, int]) -> str:
        name = value.get("kv_cache", UNQUANTIZED)
        if not isinstance(name, str) or name not in KV_FORMATS:
            raise self._error(
                lines.get("kv_cache"), f"`kv_cache` is one of {', '.join(KV_FORMATS)}; not {name!r}"
            )
        return name

    def _flag(self, value: Mapping[str, Any], key: str, lines: dict[str, int]) -> bool:
        flag = value.get(key, False)
        if not isinstance(flag, bool):
            raise self._error(lines.get(key), f"`{key}` is true or false, not {flag!r}")
        return flag

    def _steps(self, value: Mapping[str, Any], key: str, lines: dict[str, int]) -> int:
        steps = value.get(key, 0)
        if isinstance(steps, bool) or not isinstance(steps, int) or not 0 <= steps <= MAX_STEPS:
            raise self._error(
                lines.get(key), f"`{key}` is a number of steps up to {MAX_STEPS}, not {steps!r}"
            )
        return steps

    def _text(self, value: Mapping[str, Any], key: str, lines: dict[str, int]) -> str:
        text = value.get(key, "")
        if not isinstance(text, str) or len(text) > MAX_TEXT:
            raise self._error(lines.get(key), f"`{key}` is text of at most {MAX_TEXT} characters")
        return text.strip()

    def _calibration(self, value: Mapping[str, Any], lines: dict[str, int]) -> str:
        """The text's name; a file's with the recipe's folder in front."""
        source = self._text(value, "calibration", lines)
        if not source or not _is_file_name(source):
            return source
        return str(self.path.parent / Path(source).expanduser())

    def _error(self, line: int | None, what: str) -> UserError:
        return UserError(f"{self.path}{f', line {line}' if line else ''}: {what}")


def _recipe_keys(chosen: type[WeightFormat]) -> list[str]:
    """A recipe's keys but for bounds, in the order of its fields: `spec` is `format` and its parameters."""
    names = [f.name for f in fields(Recipe) if f.name != "bounds"]
    index = names.index("spec")
    return [*names[:index], "format", *parameter_names(chosen), *names[index + 1 :]]


def _line_of(node: yaml.MappingNode, key: str) -> int | None:
    return next((name.start_mark.line + 1 for name, _ in node.value if name.value == key), None)
