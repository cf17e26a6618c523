"""Fields of OpenAI's and vLLM's requests that this server does not support, and their neutral values.

Clients always send many of these fields. Fields without an effect on answers may hold anything. Any other
field is refused if its value would change an answer, because a silently ignored parameter gives wrong
results.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic_core import PydanticCustomError

from ...base.log import logger

MOST_NAMED = 16
MOST_LOGGED = 1000
"""Names of unknown fields that the log mentions, each once, however many clients invent."""
SAFE_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,64}")

WITHOUT_EFFECT = frozenset(
    {
        "cache_salt",
        "metadata",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_retention",
        "request_id",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
"""Fields for accounting, caching and speed, on which no answer depends."""


EMPTY: tuple[object, ...] = ([], {}, "")
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": EMPTY,
    "best_of": (1,),
    "chat_template": (),
    "continue_final_message": (False,),
    "detokenize": (True,),
    "documents": EMPTY,
    "early_stopping": (False,),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": EMPTY,
    "guided_choice": EMPTY,
    "guided_grammar": EMPTY,
    "guided_json": ("",),
    "guided_regex": EMPTY,
    "include_reasoning": (True,),
    "include_stop_str_in_output": (False,),
    "kv_transfer_params": EMPTY,
    "length_penalty": (1,),
    "logits_processors": EMPTY,
    "mm_processor_kwargs": EMPTY,
    "modalities": (["text"],),
    "priority": (0,),
    "reasoning_effort": (),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "structured_outputs": EMPTY,
    "suffix": EMPTY,
    "tool_choice": ("none", "auto"),
    "tools": EMPTY,
    "parallel_tool_calls": (True, False),
    "truncate_prompt_tokens": (),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "verbosity": (),
    "vllm_xargs": EMPTY,
    "web_search_options": (),
}
"""The values of each field that do not change an answer; null never does."""


def without_neutral(body: Mapping[str, Any], own: Iterable[str]) -> dict[str, Any]:
    """Return `body` without nulls and without known fields that have neutral values.

    PydanticCustomError is raised if a known field has another value.

    own: the fields that the server itself supports
    """
    kept = {}
    for name, value in body.items():
        if value is None:
            continue
        if name in own or (name not in WITHOUT_EFFECT and name not in NEUTRAL):
            kept[name] = value
        elif name in NEUTRAL and not _is_one_of(value, NEUTRAL[name]):
            raise PydanticCustomError(
                "unsupported_parameter",
                "{param} is not supported by this server, and such a value would change the answer",
                {"param": name},
            )
    return kept


def _is_one_of(value: object, neutral: tuple[object, ...]) -> bool:
    """Say whether `value` is one of the neutral values; true does not equal 1 here."""
    return any(value == choice and isinstance(value, bool) == isinstance(choice, bool) for choice in neutral)


def lenient_schema(schema: dict[str, Any]) -> None:
    """Add this file's fields to the JSON schema of a request, and allow null everywhere."""
    properties, required = schema["properties"], schema.get("required", [])
    for name, own in properties.items():
        if name not in required and {"type": "null"} not in own.get("anyOf", []):
            kept = {key: own.pop(key) for key in ("title", "default", "description") if key in own}
            properties[name] = {"anyOf": [own, {"type": "null"}], **kept}
    for name in sorted(WITHOUT_EFFECT - properties.keys()):
        properties[name] = {"description": "Accepted; has no effect."}
    for name in sorted(NEUTRAL.keys() - properties.keys()):
        properties[name] = {"enum": [*NEUTRAL[name], None], "description": "Only what asks for nothing."}


class UnknownFields:
    """Name the fields that nobody knows, to the client and once each in the log."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def headers(self, unknown: Iterable[str]) -> dict[str, str]:
        """Return the header of an answer to a request with these fields; none if there are none."""
        names = sorted(name if SAFE_NAME.fullmatch(name) else "?" for name in unknown)
        if not names:
            return {}
        for name in names[:MOST_NAMED]:
            if name not in self._logged and len(self._logged) < MOST_LOGGED:
                self._logged.add(name)
                logger.warning(f"a request holds the unknown parameter {name}, which is ignored")
        more = "" if len(names) <= MOST_NAMED else f" and {len(names) - MOST_NAMED} more"
        return {
            "Warning": f'299 scalegate "unknown parameters ignored: {", ".join(names[:MOST_NAMED])}{more}"'
        }
