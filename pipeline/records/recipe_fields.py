"""The types of a recipe's fields: pydantic checks a recipe's file by them, and errors quote them.

A field's type describes its values in words (`expected`), so that an error names the key, the allowed values
and the given value.
"""

from collections.abc import Callable, Iterable
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, ValidationInfo, WrapValidator

from ...base.batch_invariance import INVARIANCE_MODES
from ...base.errors import UserError
from ...base.untrusted_names import name_refusal
from ...layouts.formats.all_formats import WEIGHT_FORMATS
from ...layouts.kv.format import KV_FORMATS
from ...serving_check.evidence.artifact_figures import PARTS
from ...serving_check.profiles import PROFILES
from .name_patterns import compiled

KEEP, QUANTIZE = "keep", "quantize"
EXACT, NEAREST = "exact", "nearest"
DATA_FREE, GPTQ, AWQ, AWQ_GPTQ = "data-free", "gptq", "awq", "awq-gptq"
REGEX_PREFIX = "re:"
MAX_TEXT = 1000
"""The most characters of a name or a description."""
MAX_PATTERNS = 256
MAX_STEPS = 100_000
MAX_SHOWN = 60
"""How many characters of a wrong value an error quotes."""


def expected(expectation: str) -> WrapValidator:
    """Make the errors of a type say what the key must be and what it is: `<expectation>; not <value>`."""

    def check(value: Any, accept: Callable[[Any], Any], info: ValidationInfo) -> Any:
        try:
            return accept(value)
        except ValidationError:
            raise ValueError(f"`{info.field_name}` is {expectation}; not {_shown(value)}") from None

    return WrapValidator(check)


def one_of(names: Iterable[str], alphabetical: bool = False) -> WrapValidator:
    """Accepts a name out of `names`, which may grow: plugins register formats.

    alphabetical: list the names so in errors, if their own order depends on the order of imports
    """

    def check(value: Any, accept: Callable[[Any], Any], info: ValidationInfo) -> Any:
        if isinstance(value, str) and value in names:
            return value
        listed = ", ".join(sorted(names) if alphabetical else names)
        raise ValueError(f"`{info.field_name}` is one of {listed}; not {_shown(value)}")

    return WrapValidator(check)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"


def _as_tuple(value: Any) -> Any:
    """Return the items of a list as a tuple. A single pattern may stand without a list, and a key without a
    value."""
    if value is None or value == "":
        return ()
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


def _single(value: Any) -> Any:
    """Return the item of a list that has just one."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _require_expression(pattern: str) -> str:
    if pattern.startswith(REGEX_PREFIX):
        try:
            compiled(pattern.removeprefix(REGEX_PREFIX))
        except UserError as error:
            raise ValueError(error.message) from error
    return pattern


def _require_expressions(patterns: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
    if len(patterns) > MAX_PATTERNS:
        raise ValueError(f"`{info.field_name}` has more than {MAX_PATTERNS} patterns; use wider ones")
    return tuple(map(_require_expression, patterns))


def _require_relative(pattern: str) -> str:
    reason = name_refusal(pattern)
    if reason is not None:
        raise ValueError(reason)
    return pattern


Strict = Field(strict=True)
"""Turns off conversion of types: `3` is no text, `'3'` no number and `1` not true."""
NonEmpty = Annotated[str, Field(min_length=1)]

Text = Annotated[
    str,
    Field(max_length=MAX_TEXT),
    AfterValidator(str.strip),
    expected(f"text of at most {MAX_TEXT} characters"),
]
Flag = Annotated[bool, Strict, expected("true or false")]
Steps = Annotated[int, Strict, Field(ge=0, le=MAX_STEPS), expected(f"a number of steps up to {MAX_STEPS}")]
Pattern = Annotated[
    NonEmpty,
    BeforeValidator(_single),
    expected("a module pattern, such as `*.down_proj`"),
    AfterValidator(_require_expression),
]
Patterns = Annotated[
    tuple[NonEmpty, ...],
    Strict,
    BeforeValidator(_as_tuple),
    expected("a list of module patterns, such as `*.down_proj`"),
    AfterValidator(_require_expressions),
]
FilePatterns = Annotated[
    tuple[Annotated[str, AfterValidator(_require_relative)], ...],
    Strict,
    BeforeValidator(_as_tuple),
    expected("a list of patterns of files inside the source, such as `*.py`"),
]
Parts = Annotated[
    tuple[Annotated[str, one_of(PARTS)], ...],
    Strict,
    BeforeValidator(_as_tuple),
    expected(f"a list of what differs on purpose, from: {', '.join(PARTS)}"),
]
Format = Annotated[str, one_of(WEIGHT_FORMATS, alphabetical=True)]
Method = Annotated[str, one_of((DATA_FREE, GPTQ, AWQ, AWQ_GPTQ))]
Treatment = Annotated[str, one_of((KEEP, QUANTIZE))]
Fit = Annotated[str, one_of((EXACT, NEAREST))]
KVFormat = Annotated[str, one_of(KV_FORMATS)]
ProfileName = Annotated[str, one_of(PROFILES)]
BatchInvarianceField = Annotated[str, one_of(INVARIANCE_MODES)]
