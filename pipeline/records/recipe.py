"""Recipes: how each linear layer is quantized, and the bounds for the result.

`recipe_file.py` reads a recipe from YAML; `quantization/shards/tasks.py` applies it to a checkpoint.
"""

import fnmatch
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, SkipValidation

from ...base.batch_invariance import TUNED
from ...layouts.formats.int4 import Int4
from ...layouts.formats.weight_format import WeightFormat, spec_to_json
from ...serving_check.engine.options import UNQUANTIZED
from .name_patterns import full_match
from .recipe_fields import (
    DATA_FREE,
    EXACT,
    KEEP,
    REGEX_PREFIX,
    BatchInvarianceField,
    FilePatterns,
    Fit,
    KVFormat,
    Method,
    Parts,
    Pattern,
    Patterns,
    ProfileName,
    Steps,
    Text,
    Treatment,
)

DEFAULT_SPEC = Int4()
SELF, HUB = "self", "hub:"
"""Where a calibration text comes from, if not from a file: `self`, or `hub:` and a data set's name."""


@dataclass(frozen=True)
class Rule:
    """The format of the modules that match one pattern; the first rule that matches wins.

    In YAML a rule has `format` with that format's parameters; or only parameters, which change the recipe's
    own format; or `ignore: true`, which is short for `format: unquantized`.
    """

    modules: Pattern
    """A shell pattern over module names (`*.down_proj`), or `re:` and a regular expression."""
    spec: SkipValidation[WeightFormat]
    reason: str = ""
    """Why the modules stay unquantized, if the recipe's author did not decide it; not in YAML."""


@dataclass(frozen=True)
class Recipe:
    """How a checkpoint is quantized: every linear layer of its decoder, unless a field says otherwise."""

    __pydantic_config__ = ConfigDict(arbitrary_types_allowed=True)

    name: Text = ""
    """The shipped recipe's name, or the file's without its suffix."""
    description: Text = ""
    spec: SkipValidation[WeightFormat] = DEFAULT_SPEC
    """In YAML: `format`, and its parameters beside it."""
    method: Method = DATA_FREE
    """How weights are rounded: `data-free`, each weight by itself; `gptq` or `awq`, so that the outputs on a
    text change least (`quantization/solvers/`); or both, `awq-gptq`."""
    learned_rounding: Steps = 0
    """Number of steps for which each layer's rounding is learned afterwards
    (`solvers/learned_rounding.py`)."""
    calibration: Text = ""
    """The calibration text: a file, by its path from the recipe's folder; `hub:OWNER/NAME`; or `self`, for a
    text that the model writes itself, which is also the default of recipes that need a text."""
    include: Patterns = ()
    """Patterns of the modules to quantize; none means all."""
    ignore: Patterns = ()
    """Patterns of modules to keep as they are."""
    rules: tuple[Rule, ...] = ()
    fit: Fit = EXACT
    """What to do with layers that cannot have the format, such as INT4 in groups of 128 if K is 2,880:
    `exact` refuses them; `nearest` gives them the nearest parameters, with the largest group that divides K,
    or leaves them unquantized if there are none."""
    leave_out: Patterns = ()
    """Patterns of tensors that the artifact does not have, such as `v_head.*` of a trained reward."""
    lm_head: Treatment = KEEP
    """`quantize` unties a tied output projection: it gets a quantized copy, and the embeddings stay."""
    embeddings: Treatment = KEEP
    """`quantize` is for Scalegate's own server: other engines refuse quantized embeddings."""
    kv_cache: KVFormat = UNQUANTIZED
    """How keys and values are stored in serving, a name in `KV_FORMATS`. With `format: unquantized` the
    weights stay as they are."""
    batch_invariance: BatchInvarianceField = TUNED
    """The batch invariance that the recipe claims for serving (`base/batch_invariance.py`); the gate tests
    it."""
    rival: Text = ""
    """Another recipe, by name or file. This recipe's artifact must have more throughput than the other's."""
    profile: ProfileName = ""
    """The profile of loads that the gate measures besides its own load (`serving_check/profiles.py`)."""
    files: FilePatterns = ()
    """Shell patterns, by relative path, of further files that are copied beside the weights."""
    changes: Parts = ()
    """Parts of the tokenizer, the templates and the generation settings that differ from the baseline's on
    purpose, as `serving_check.evidence.artifact_figures.PARTS` names them."""
    bounds: dict[str, float] = field(default_factory=dict)
    """The gate's bounds (`serving_check.settings.Bounds`) and the release policy's settings
    (`serving_check.gate.policy.ReleasePolicy`) that this recipe changes, by their names there."""

    def to_json(self) -> dict[str, Any]:
        """Return the recipe in the form of YAML, defaults included, with bounds at the top level."""
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
            **({"fit": self.fit} if self.fit != EXACT else {}),
            **({"leave_out": list(self.leave_out)} if self.leave_out else {}),
            "lm_head": self.lm_head,
            "embeddings": self.embeddings,
            **({"kv_cache": self.kv_cache} if self.kv_cache != UNQUANTIZED else {}),
            **({"batch_invariance": self.batch_invariance} if self.batch_invariance != TUNED else {}),
            **({"rival": self.rival} if self.rival else {}),
            **({"profile": self.profile} if self.profile else {}),
            **({"files": list(self.files)} if self.files else {}),
            **({"changes": list(self.changes)} if self.changes else {}),
            **self.bounds,
        }


def matches(pattern: str, module: str) -> bool:
    """Say whether a recipe's pattern names `module`; `*` spans dots."""
    if pattern.startswith(REGEX_PREFIX):
        return full_match(pattern.removeprefix(REGEX_PREFIX), module)
    return fnmatch.fnmatchcase(module, pattern)


def calibration_name(source: str) -> str:
    """Return a calibration text's name in a published record: a file's name comes without its folders."""
    return Path(source).name if is_file_name(source) else source


def is_file_name(source: str) -> bool:
    """Say whether a calibration text is a file."""
    return source != SELF and not source.startswith(HUB)
