"""The options of one call of `release`, checked before the first hour of work is spent.

The stages themselves are in `release.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from ...base.batch_invariance import TUNED, BatchInvariance
from ...base.errors import UserError
from ...base.option_fields import flag, from_given, given_of
from ...serving_check.adapters.all_engines import DEFAULT_ENGINE
from ...serving_check.adapters.placement import Placement
from ...serving_check.engine.options import AUTO, UNQUANTIZED, EngineOptions
from ...serving_check.evidence.coded_load import default_input_len
from ...serving_check.gate.policy import declared_by, weaker_settings
from ...serving_check.settings import Bounds, WorkloadSettings
from ..checkpoints.checkpoint import Checkpoint
from ..machine.device import resolve_device
from ..model_loader.attention_shapes import refuse_unserved
from ..publishing.options import PublishOptions
from ..quantization.options import QuantizeOptions
from ..records.recipe import Recipe
from ..records.recipe_file import is_recipe
from ..records.signature import require_key
from ..validation.options import ValidateOptions, asked_bounds, asked_workload
from ..validation.servers import gpu_name, placed, refuse_unreached, sized_options

DEFAULT_WORK = "scalegate-work"
FOR_VALIDATE = (ValidateOptions, WorkloadSettings, Bounds, EngineOptions, Placement)
GROUPS = (QuantizeOptions, *FOR_VALIDATE, PublishOptions)
"""The dataclasses whose options `release` takes."""


@dataclass(frozen=True)
class ReleaseRequest:
    """The options of one call of `release`, grouped by stage."""

    making: QuantizeOptions
    validation: ValidateOptions
    engine: EngineOptions
    placement: Placement
    publication: PublishOptions
    given: Mapping[str, Any]
    """All given options by name, except the layout, which the artifact's plan records."""
    kv_cache: str = UNQUANTIZED
    """The KV format of the recipe."""
    profile: str | None = None
    """The profile of loads that the recipe states."""

    @property
    def devices(self) -> list[str]:
        """Return the GPUs that are named, which quantize together."""
        return [f"cuda:{gpu}" for gpu in self.placement.devices or ()]

    @property
    def device(self) -> str | None:
        """Return the device of a single process: the first of several devices; None if the user names
        none.
        """
        asked = None if self.engine.device == AUTO else self.engine.device
        return self.devices[0] if self.devices else asked

    @property
    def workload(self) -> WorkloadSettings:
        input_len = default_input_len(self.kv_cache)
        return asked_workload(self.given, input_len, WorkloadSettings.seed, self.profile)

    def bounds(self, recipe: Mapping[str, Any]) -> Bounds:
        """Return the recipe's bounds, replaced by the ones that were given."""
        return asked_bounds(recipe, self.given)


def read_request(given: Mapping[str, Any], recipe: Recipe) -> ReleaseRequest:
    """Return the request that options of `release`, by name, and the recipe's claims make.

    Raise UserError if the options cannot be released, or give servers too little context for the workload.
    """
    engine, placement = from_given(EngineOptions, given), from_given(Placement, given)
    validation = from_given(ValidateOptions, given)
    _refuse_trials(given, engine, recipe)
    _refuse_revision_of_recipe(validation, recipe)
    reaching = {name: value for name, value in given_of(EngineOptions, given).items() if name != "layout"}
    refuse_unreached(
        reaching | placement.asked_for(), validation.engine, validation.baseline_engine or validation.engine
    )
    placed(engine.device, placement)
    for gpu in placement.devices or ():
        gpu_name(gpu)
    if validation.sign is not None:
        require_key(validation.sign)
    kept = {name: value for name, value in given.items() if name != "layout"}
    if recipe.batch_invariance != TUNED:
        engine = replace(engine, batch_invariance=cast(BatchInvariance, recipe.batch_invariance))
        kept["batch_invariance"] = recipe.batch_invariance
    request = ReleaseRequest(
        from_given(QuantizeOptions, given),
        validation,
        engine,
        placement,
        from_given(PublishOptions, given),
        kept,
        recipe.kv_cache,
        recipe.profile or None,
    )
    # `validate` would refuse sizes that do not go together, after hours of work.
    sized_options(request.given, request.workload)
    return request


def refuse_unserved_source(source: Checkpoint, request: ReleaseRequest) -> None:
    """Raise UserError if the embedded engine would have to serve a model that it cannot serve: otherwise the
    servers would say so after hours of quantizing."""
    validation, workload = request.validation, request.workload
    if DEFAULT_ENGINE in (validation.engine, validation.engine_of_baseline):
        longest, device = request.engine.max_model_len, torch.device(resolve_device(request.device or AUTO))
        # Without a length of its own, the engine's is that of the workload.
        shorter_by = "" if longest else f"{flag('input_len')} + {flag('output_len')}"
        length = longest or workload.input_len + workload.output_len
        length = min(length, source.context or length)  # `require_context` says what is longer
        refuse_unserved(
            source, length, device, request.kv_cache, shorter_by, f"`kv_cache: {UNQUANTIZED}` in the recipe"
        )


def refuse_exploratory(recipe: Recipe, request: ReleaseRequest) -> None:
    """Raise UserError if the settings alone prevent publication."""
    declared = declared_by(recipe.to_json())
    bounds, tokens = request.bounds(declared), request.validation.quality_tokens
    weak = weaker_settings(request.workload, bounds, tokens, declared, request.kv_cache)
    if weak:
        raise UserError(
            "this would be an exploratory run, and those are not published:\n  "
            + "\n  ".join(weak)
            + "\nLeave these settings out, lower the policy openly in the recipe (README, "
            '"The release policy"), or use `pipeline validate`'
        )


def _refuse_trials(given: Mapping[str, Any], engine: EngineOptions, recipe: Recipe) -> None:
    """Raise UserError for options that only `validate` can try: another KV format or batch invariance than
    the recipe's.
    """
    if engine.kv_cache_dtype != AUTO:
        raise UserError(
            f"{flag('kv_cache_dtype')} tries a KV format out, but a release is served in the format that its "
            "checkpoint declares; leave the option out, or try the format with `pipeline validate`"
        )
    claim, asked = recipe.batch_invariance, given.get("batch_invariance")
    if asked is not None and asked != claim:
        raise UserError(
            f"{flag('batch_invariance')} {asked} contradicts the recipe, which says {claim}; write "
            f"`batch_invariance: {asked}` in the recipe, or try this mode with `pipeline validate`"
        )


def _refuse_revision_of_recipe(validation: ValidateOptions, recipe: Recipe) -> None:
    rival = validation.rival or recipe.rival
    if validation.rival_revision is not None and (not rival or is_recipe(rival)):
        raise UserError(
            f"{flag('rival_revision')} {validation.rival_revision} needs a rival on the Hub, but "
            f"{f'{rival} is a recipe' if rival else 'no rival is named'}; name a Hub id with {flag('rival')}"
        )
