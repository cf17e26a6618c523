"""The HTTP routes: OpenAI's completions and chat over one engine, and what an operator asks.

Not for starting anything: `run.py` does.
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
"""Characters in all that are tokenized at once: a few milliseconds, less than a worker's turn may take."""


def create_app(
    engine: EngineClient,
    model: ServedModel,
    workers: TextWorkers | None,
    metrics: Metrics,
    limits: ServerLimits,
    api_key: str | None,
) -> FastAPI:
    """The application; `engine` must be ready, and is listened to from the moment the application starts.

    workers: for the tokenizer's work; None where there is no tokenizer
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        engine.listen()
        yield

    app = FastAPI(title="Scalegate", version=own_version(), lifespan=lifespan)
    install_handlers(app)
    describe(app, needs_key=api_key is not None)
    app.add_middleware(Admission, limits=limits, api_key=api_key)
    unknown = UnknownFields()
    model_card = {"id": model.name, "object": "model", "created": int(time.time()), "owned_by": "scalegate"}
    model_card |= {"max_model_len": model.max_model_len}
    texts = TokenTexts(model.tokenizer)

    @app.post("/v1/completions", responses=GENERATED)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        check_model(body.model)
        count = body.num_prompts * body.n
        if count > limits.max_prompts:
            raise ApiError(
                f"the request has {count} prompts, each counted n times; this server's --max-prompts is "
                f"{limits.max_prompts}; send fewer at a time",
                status=413,
                param="prompt",
                code="too_many_prompts",
            )
        if workers is None or body.text_length <= SHORT_TEXT:
            prompts, echo = model.prompts_of(body), model.prompt_texts(body)
        else:
            prompts, echo = await workers.run(encode_prompts, body, model.most_characters)
            model.check_prompts(prompts)
        request_id = f"cmpl-{uuid.uuid4().hex}"
        skip = body.skip_special_tokens
        generation = new_generation(body, request_id, prompts, await grammar_of(body), skip)
        api = Completions(request_id, model.name, texts, body, generation.prompts, echo)
        return await answer(request, body, generation, api, unknown.headers(body.unknown))

    @app.post("/v1/chat/completions", responses=GENERATED)
    async def chat_completions(body: ChatCompletionRequest, request: Request) -> Response:
        check_model(body.model)
        model.check_chat(body)
        assert workers is not None
        tools = model.tool_format if body.offered_tools else None
        prompt = await workers.run(encode_chat, body, model.most_characters)
        request_id = f"chatcmpl-{uuid.uuid4().hex}"
        skip = body.skip_special_tokens and not (tools and tools.special)
        generation = new_generation(body, request_id, [prompt], await grammar_of(body), skip)
        api = ChatCompletions(request_id, model.name, texts, body, generation.prompts, tools)
        return await answer(request, body, generation, api, unknown.headers(body.unknown))

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model_card]}

    @app.get("/v1/models/{name:path}")
    async def model_of(name: str) -> dict[str, Any]:
        check_model(name)
        return model_card

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest | TokenizeChatRequest) -> dict[str, Any]:
        check_model(body.model)
        if isinstance(body, TokenizeChatRequest):
            model.check_chat(body.chat())
            tokens = await text_workers("messages").run(encode_chat, body.chat(), limits.max_body_bytes)
        else:
            work = encode_text, body.prompt, body.add_special_tokens
            tokens = await text_workers("prompt").run(*work)
        strings = [texts[token] for token in tokens] if body.return_token_strs else None
        counted = {"count": len(tokens), "max_model_len": model.max_model_len}
        return {**counted, "tokens": tokens, "token_strs": strings}

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> dict[str, str]:
        check_model(body.model)
        model.check_token_ids(body.tokens, "tokens")
        return {"prompt": await text_workers("tokens").run(decode_tokens, body.tokens)}

    @app.get("/health")
    async def health() -> Response:
        if engine.dead is not None:
            return engine_unavailable(f"the engine has died: {engine.dead}").response()
        return JSONResponse({"status": "ok"})

    @app.get("/metrics", response_class=PlainTextResponse, responses=TEXT)
    async def metrics_text() -> Response:
        return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/version")
    async def version_of() -> dict[str, str]:
        return {"version": app.version}

    def check_model(name: str | None) -> None:
        if name is not None and name != model.name:
            raise ApiError(
                f"the model {name!r} is not served here; {model.name!r} is",
                status=404,
                param="model",
                code="model_not_found",
            )

    def text_workers(param: str) -> TextWorkers:
        if workers is None:
            raise ApiError(f"{model.name} has no tokenizer", param=param)
        return workers

    async def grammar_of(body: CompletionRequest | ChatCompletionRequest) -> str | None:
        schema = body.answer_schema
        return None if schema is None else await text_workers("response_format").run(compile_schema, schema)

    def new_generation(
        body: CompletionRequest | ChatCompletionRequest,
        request_id: str,
        prompts: list[list[int]],
        grammar: str | None,
        skip_special_tokens: bool,
    ) -> Generation:
        params = [model.sampling_params(body, len(prompt), grammar) for prompt in prompts]
        return Generation(
            engine,
            model.tokenizer,
            request_id,
            prompts,
            params,
            body.n,
            body.stop_strings,
            skip_special_tokens,
        )

    return app


async def answer(
    request: Request,
    body: CompletionRequest | ChatCompletionRequest,
    generation: Generation,
    api: Api,
    headers: dict[str, str],
) -> Response:
    """Stream or collect, whichever was asked for."""
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
    """Server-sent events, one for each sequence with new tokens; all that is ready goes in one write."""
    head = {**api.head, "object": api.chunk_object}
    encoded_head = ENCODE(head)

    def chunk(choice: dict[str, Any]) -> bytes:
        more = {"usage": usage(generation)} if options.continuous_usage_stats else {}
        return choice_event(encoded_head, choice, more)

    last = b""
    try:
        opening = [chunk(choice) for choice in api.opening()]
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
