"""The contents of `/openapi.json`: every status that a route can answer with, and the schema of its answer.

The models in `schema.py` check requests, and their JSON schemas are shown as they are.
"""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

REASONS = {
    400: "The request is malformed, asks for what is not supported, or does not fit the model's context.",
    401: "The API key is missing or wrong.",
    404: "The model is not served here.",
    405: "The path has no such method.",
    408: "The request came too slowly.",
    413: "The body is too large, or holds too many prompts.",
    429: "Too much is asked at once; try again later.",
    431: "The headers are too large.",
    500: "The engine or the server failed on this request.",
    503: "The engine is gone, or the server is full or going down.",
}
OF_ALL = (401, 405, 408, 413, 429, 431, 500, 503)
"""The statuses of answers that do not depend on the request."""
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
ERROR_CONTENT = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
EVENT = {"type": "object", "required": ["data"], "properties": {"data": {"type": "string"}}}
EVENTS = {"text/event-stream": {"itemSchema": EVENT}}
"""The schema of each event, in OpenAPI 3.2's form; readers of 3.1 ignore it."""
OBJECT = {"application/json": {"schema": {"type": "object"}}}
GENERATED: dict[int | str, dict[str, Any]] = {
    200: {"description": "The answer; server-sent events where `stream` is true.", "content": OBJECT | EVENTS}
}
TEXT: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "Prometheus' text format.",
        "content": {"text/plain": {"schema": {"type": "string"}}},
    }
}


def describe(app: FastAPI, needs_key: bool) -> None:
    """Make `app` describe all of its answers."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _whole(app, needs_key)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _whole(app: FastAPI, needs_key: bool) -> dict[str, Any]:
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for validations in ("HTTPValidationError", "ValidationError"):
        schemas.pop(validations, None)
    schemas["Error"] = ERROR
    for path, methods in document["paths"].items():
        for operation in methods.values():
            responses = operation["responses"]
            responses.pop("422", None)
            own = (400, 404) if "requestBody" in operation or "{" in path else ()
            for status in sorted({*OF_ALL, *own}):
                answer = {"description": REASONS[status], "content": ERROR_CONTENT}
                responses.setdefault(str(status), answer)
    if needs_key:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return document
