"""The description of a checkpoint besides its weights, sent from the engine's process to the API's.

The description has its own file because the engine's process needs nothing of HTTP.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...base.errors import UserError
from ..engine.request import SamplingParams

SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class SamplingDefaults:
    """The defaults of a request, from `generation_config.json` as vLLM reads it."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = None

    @classmethod
    def from_generation_config(cls, config: Mapping[str, Any]) -> "SamplingDefaults":
        """Return the defaults in a generation config. A value outside a request's own bounds raises
        UserError.
        """
        values = {key: config[key] for key in SAMPLING_KEYS if config.get(key) is not None}
        if values.get("top_k") == -1:
            values["top_k"] = 0
        most = {} if config.get("max_new_tokens") is None else {"max_tokens": config["max_new_tokens"]}
        try:
            if most and most["max_tokens"] == 0:
                raise UserError("max_new_tokens is 0; it must be a whole number from 1 on")
            SamplingParams(**values, **most)
        except UserError as error:
            raise UserError(
                f"generation_config.json: {error.message}; correct or remove this setting"
            ) from error
        return cls(**values, max_tokens=config.get("max_new_tokens"))


@dataclass(frozen=True)
class ModelDescription:
    """The description of a checkpoint besides its weights."""

    tokenizer: Any | None
    """A transformers tokenizer; None serves token ids only."""
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
