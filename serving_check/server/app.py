"""The HTTP routes: OpenAI's completions and chat over one engine, and an operator's endpoints.

Nothing is started here: `run.py` does that.
"""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST

from ...base.installed import own_version
from .admission import Admission
from .engine_client import EngineClient
from .errors import ApiError, engine_unavailable, install_handlers
from .generation import Delta, Generation
from .limits import ServerLimits
from .metrics import Metrics
from .neutral_fields import UnknownFields
from .openapi import GENERATED, TEXT, describe
from .responses import (
    DONE,
    ENCODE,
    Api,
    ChatCompletions,
    Choice,
    Completions,
    TokenTexts,
    choice_event,
    event,
    usage,
)
from .schema import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    StreamOptions,
    TokenizeChatRequest,
    TokenizeRequest,
)
from .served_model import ServedModel, decode_tokens, encode_chat, encode_prompts, encode_text
from .structured import compile_schema
from .text_workers import TextWorkers

T = TypeVar("T")
CLIENT_CLOSED_REQUEST = 499
SHORT_TEXT = 8192
"""The most characters that are tokenized in this process: a few milliseconds, less than waiting for a
worker."""


def create_app(
    engine: EngineClient,
    model: ServedModel,
    workers: TextWorkers | None,
    metrics: Metrics,
    limits: ServerLimits,
    api_key: str | None,
) -> FastAPI:
    """Return the application; `engine` must be ready, and is listened to from the moment the application
    starts.

    workers: processes for the tokenizer's work; None if there is no tokenizer
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        engine.listen()
        yield

    app = FastAPI(title="Scalegate", version=own_version(), lifespan=lifespan)
    install_handlers(app)
    describe(app, needs_key=api_key is not None)
    app.add_middleware(Admission, limits=limits, api_key=api_key)
    routes = Routes(engine, model, workers, metrics, limits)
    app.post("/v1/completions", responses=GENERATED)(routes.completions)
    app.post("/v1/chat/completions", responses=GENERATED)(routes.chat_completions)
    app.get("/v1/models")(routes.models)
    app.get("/v1/models/{name:path}")(routes.model_of)
    app.post("/tokenize")(routes.tokenize)
    app.post("/detokenize")(routes.detokenize)
    app.get("/health")(routes.health)
    app.get("/metrics", response_class=PlainTextResponse, responses=TEXT)(routes.metrics_text)
    app.get("/version")(routes.version_of)
    return app


class Routes:
    """The handler of every route, over one engine and one model."""

    # A handler's docstring would be its description in `/openapi.json`: none has one.

    def __init__(
        self,
        engine: EngineClient,
        model: ServedModel,
        workers: TextWorkers | None,
        metrics: Metrics,
        limits: ServerLimits,
    ):
        self._engine = engine
        self._model = model
        self._workers = workers
        self._metrics = metrics
        self._limits = limits
        self._unknown = UnknownFields()
        self._texts = TokenTexts(model.tokenizer)
        self._model_card = {
            "id": model.name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "scalegate",
            "max_model_len": model.max_model_len,
        }

    async def completions(self, body: CompletionRequest, request: Request) -> Response:
        self._check_model(body.model)
        self._check_number_of_prompts(body.num_prompts * body.n)
        if self._workers is None or body.text_length <= SHORT_TEXT:
            prompts, echo = self._model.prompts_of(body), self._model.prompt_texts(body)
        else:
            prompts, echo = await self._workers.run(encode_prompts, body, self._model.most_characters)
            self._model.check_prompts(prompts)
        request_id = f"cmpl-{uuid.uuid4().hex}"
        generation = await self._generation(body, request_id, prompts, body.skip_special_tokens)
        api = Completions(request_id, self._model.name, self._texts, body, generation.prompts, echo)
        return await answer(request, body, generation, api, self._unknown.headers(body.unknown))

    async def chat_completions(self, body: ChatCompletionRequest, request: Request) -> Response:
        self._check_model(body.model)
        self._model.check_chat(body)
        assert self._workers is not None
        tools = self._model.tool_format if body.offered_tools else None
        prompt = await self._workers.run(encode_chat, body, self._model.most_characters)
        request_id = f"chatcmpl-{uuid.uuid4().hex}"
        skip = body.skip_special_tokens and not (tools and tools.special)
        generation = await self._generation(body, request_id, [prompt], skip)
        api = ChatCompletions(request_id, self._model.name, self._texts, body, generation.prompts, tools)
        return await answer(request, body, generation, api, self._unknown.headers(body.unknown))

    async def models(self) -> dict[str, Any]:
        return {"object": "list", "data": [self._model_card]}

    async def model_of(self, name: str) -> dict[str, Any]:
        self._check_model(name)
        return self._model_card

    async def tokenize(self, body: TokenizeRequest | TokenizeChatRequest) -> dict[str, Any]:
        self._check_model(body.model)
        if isinstance(body, TokenizeChatRequest):
            chat = body.chat()
            self._model.check_chat(chat)
            workers = self._text_workers("messages")
            tokens = await workers.run(encode_chat, chat, self._limits.max_body_bytes)
        else:
            workers = self._text_workers("prompt")
            tokens = await workers.run(encode_text, body.prompt, body.add_special_tokens)
        return {
            "count": len(tokens),
            "max_model_len": self._model.max_model_len,
            "tokens": tokens,
            "token_strs": [self._texts[token] for token in tokens] if body.return_token_strs else None,
        }

    async def detokenize(self, body: DetokenizeRequest) -> dict[str, str]:
        self._check_model(body.model)
        self._model.check_token_ids(body.tokens, "tokens")
        return {"prompt": await self._text_workers("tokens").run(decode_tokens, body.tokens)}

    async def health(self) -> Response:
        if self._engine.dead is not None:
            return engine_unavailable(f"the engine has died: {self._engine.dead}").response()
        return JSONResponse({"status": "ok"})

    async def metrics_text(self) -> Response:
        return Response(self._metrics.text(), media_type=CONTENT_TYPE_LATEST)

    async def version_of(self) -> dict[str, str]:
        return {"version": own_version()}

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self._model.name:
            raise ApiError(
                f"the model {name!r} is not served here; {self._model.name!r} is",
                status=404,
                param="model",
                code="model_not_found",
            )

    def _check_number_of_prompts(self, count: int) -> None:
        if count > self._limits.max_prompts:
            raise ApiError(
                f"the request has {count} prompts, each counted n times; this server's --max-prompts is "
                f"{self._limits.max_prompts}; send fewer at a time",
                status=413,
                param="prompt",
                code="too_many_prompts",
            )

    def _text_workers(self, param: str) -> TextWorkers:
        if self._workers is None:
            raise ApiError(f"{self._model.name} has no tokenizer", param=param)
        return self._workers

    async def _generation(
        self,
        body: CompletionRequest | ChatCompletionRequest,
        request_id: str,
        prompts: list[list[int]],
        skip_special_tokens: bool,
    ) -> Generation:
        schema = body.answer_schema
        grammar = None
        if schema is not None:
            grammar = await self._text_workers("response_format").run(compile_schema, schema)
        params = [self._model.sampling_params(body, len(prompt), grammar) for prompt in prompts]
        return Generation(
            self._engine,
            self._model.tokenizer,
            request_id,
            prompts,
            params,
            body.n,
            body.stop_strings,
            skip_special_tokens,
        )


async def answer(
    request: Request,
    body: CompletionRequest | ChatCompletionRequest,
    generation: Generation,
    api: Api,
    headers: dict[str, str],
) -> Response:
    """Return the answer to a request, streamed or whole, as the request asks."""
    if not body.stream:
        response = await unless_disconnected(request, collect(generation, api))
        response.headers.update(headers)
        return response
    deltas = generation.deltas()
    # The first tokens are awaited before the status is sent: a refusal by the engine can still be one.
    first = await unless_disconnected(request, anext(deltas))
    events = stream(first, deltas, generation, api, body.stream_options or StreamOptions())
    return StreamingResponse(
        events, media_type="text/event-stream", headers={"Cache-Control": "no-cache", **headers}
    )


async def collect(generation: Generation, api: Api) -> Response:
    choices = [Choice(index) for index in range(len(generation.prompts))]
    async for deltas in generation.deltas():
        for delta in deltas:
            choices[delta.index].add(delta)
    body = {
        **api.head,
        "object": api.whole_object,
        "choices": [api.whole_choice(choice) for choice in choices],
        "usage": usage(generation),
    }
    return JSONResponse(body)


async def stream(
    first: list[Delta],
    rest: AsyncIterator[list[Delta]],
    generation: Generation,
    api: Api,
    options: StreamOptions,
) -> AsyncIterator[bytes]:
    """Yield server-sent events, one for each sequence with new tokens; all ready events are written at
    once.
    """
    head = {**api.head, "object": api.chunk_object}
    encoded_head = ENCODE(head)

    def chunk(choice: dict[str, Any], beside: dict[str, Any] | None = None) -> bytes:
        more = {"usage": usage(generation)} if options.continuous_usage_stats else {}
        return choice_event(encoded_head, choice, {**(beside or {}), **more})

    last = b""
    try:
        opening = [chunk(choice, beside) for choice, beside in api.opening()]
        yield b"".join([*opening, *(chunk(api.chunk_choice(delta)) for delta in first)])
        async for deltas in rest:
            yield b"".join([chunk(api.chunk_choice(delta)) for delta in deltas])
        if options.include_usage:
            last = event({**head, "choices": [], "usage": usage(generation)})
    except ApiError as error:
        last = event(error.body())
    finally:
        await rest.aclose()  # type: ignore[attr-defined]
    yield last + DONE


async def unless_disconnected(request: Request, work: Awaitable[T]) -> T:
    """Await `work`; cancel it if the client goes away first."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError("the client closed the connection", status=CLIENT_CLOSED_REQUEST)
        return task.result()
    finally:
        gone.cancel()
        task.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
