"""`response_format`: any JSON, or JSON of a schema, as a grammar that the engine follows; made with
llguidance.

Schemas come from clients: they are bounded in size, and compiled in a text worker before the engine does.
"""

import json
import time
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field

from .errors import ApiError

MOST_SCHEMA_BYTES = 1 << 16
MOST_SECONDS = 0.5
"""The most seconds for compiling a schema: the engine, and so every request, waits as long again."""


class Format(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, populate_by_name=True)


class TextFormat(Format):
    type: Literal["text"]


class JsonObjectFormat(Format):
    type: Literal["json_object"]


class NamedSchema(Format):
    name: str | None = None
    json_schema: dict[str, Any] = Field(alias="schema")


class JsonSchemaFormat(Format):
    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Discriminator("type")]


def schema_of(response_format: ResponseFormat | None) -> dict[str, Any] | None:
    """Return the JSON schema that an answer has to satisfy; None if it may be any text."""
    if isinstance(response_format, JsonSchemaFormat):
        return response_format.json_schema.json_schema
    return {"type": "object"} if isinstance(response_format, JsonObjectFormat) else None


def schema_of_call(name: str, parameters: dict[str, Any] | None) -> dict[str, Any]:
    """Return the schema of one call of a tool, whose arguments have the schema `parameters`; None for any."""
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": parameters or {"type": "object"}},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def compile_schema(tokenizer: Any, schema: dict[str, Any]) -> str:
    """Return a grammar for the engine; this runs in a worker, whose tokenizer it does not need.

    ApiError is raised if the schema is invalid, too large, or not supported.
    """
    try:
        import llguidance
    except ImportError as error:
        raise ApiError(
            "this server cannot keep answers to a JSON schema: llguidance is not installed there",
            param="response_format",
            code="unsupported_parameter",
        ) from error
    text = json.dumps(schema)
    if len(text) > MOST_SCHEMA_BYTES:
        raise refused(f"it has {len(text)} characters; at most {MOST_SCHEMA_BYTES} are taken")
    started = time.monotonic()
    try:
        # Without free whitespace, of which a model may write without end.
        compact = llguidance.LLMatcher.grammar_from_json_schema(
            text, overrides={"whitespace_flexible": False}
        )
        fault = llguidance.LLMatcher.validate_grammar(compact, None)
    except ValueError as error:
        raise refused(str(error)) from error
    if fault:
        raise refused(fault)
    if time.monotonic() - started > MOST_SECONDS:
        raise refused("it takes too long to compile")
    return compact


def refused(reason: str) -> ApiError:
    message = f"the JSON schema cannot be used: {reason}"[:1000]
    return ApiError(message, param="response_format", code="invalid_schema")
