"""Refusals in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}` with the status that fits."""

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"


class ApiError(Exception):
    """An answer other than success, which is raised anywhere in the handling of a request."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        type: str = INVALID_REQUEST,
        param: str | None = None,
        code: str | None = None,
    ):
        super().__init__(message)
        self.message = message
        self.status = status
        self.type = type
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), status_code=self.status)


def engine_unavailable(message: str) -> ApiError:
    """Return the error if the engine has ended or the server is stopping: the client is not at fault and need
    not retry."""
    return ApiError(message, status=503, type=SERVER_ERROR, code="engine_unavailable")


def step_failed(message: str) -> ApiError:
    """Return the error if the engine could not compute this request; other requests continue."""
    return ApiError(
        f"the engine failed on this request, and on no other: {message}",
        status=500,
        type=SERVER_ERROR,
        code="engine_step_failed",
    )


def install_handlers(app: FastAPI) -> None:
    """Make every refusal of `app`, also FastAPI's own, OpenAI-shaped."""

    @app.exception_handler(ApiError)
    async def refuse(_: Request, error: ApiError) -> JSONResponse:
        return error.response()

    @app.exception_handler(RequestValidationError)
    async def refuse_invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        return from_validation(error).response()

    @app.exception_handler(HTTPException)
    async def refuse_route(request: Request, error: HTTPException) -> JSONResponse:
        message = f"{request.method} {request.url.path}: {error.detail}"
        response = ApiError(message, status=error.status_code).response()
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(Exception)
    async def fail(_: Request, error: Exception) -> JSONResponse:
        message = f"the server failed on this request: {type(error).__name__}"
        return ApiError(message, status=500, type=SERVER_ERROR).response()


def from_validation(error: RequestValidationError) -> ApiError:
    """Return pydantic's first error, in one line."""
    first = error.errors()[0]
    path = [str(part) for part in first["loc"] if part != "body"]
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", first["msg"])
        return ApiError(f"the request body is not valid JSON: {reason}", code="invalid_json")
    name = path[0] if path else None
    if first["type"] == "extra_forbidden":
        return ApiError(
            f"unknown parameter {'.'.join(path)!r}; this server ignores nothing silently",
            param=name,
            code="unknown_parameter",
        )
    if first["type"] == "missing":
        return ApiError(f"parameter {'.'.join(path)!r} is missing", param=name, code="missing_parameter")
    if first["type"] == "unsupported_parameter":
        return ApiError(first["msg"], param=first["ctx"]["param"], code="unsupported_parameter")
    where = f"{name}: " if name else ""
    message = first["msg"].removeprefix("Value error, ")
    return ApiError(f"{where}{message}", param=name, code="invalid_value")
