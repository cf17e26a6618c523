"""The two generation requests as pydantic models: every parameter the server honours.

`neutral_fields.py` has further fields of clients; unknown fields are kept, so that they can be named.
"""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, FailFast, Field, Tag, model_validator

from ..engine.request import (
    LEAST_TOP_P,
    MOST_BIAS,
    MOST_BIASED_TOKENS,
    MOST_PENALTY,
    MOST_STOP_TOKEN_IDS,
    MOST_TEMPERATURE,
    MOST_TOKENS,
    REPETITION_PENALTIES,
    SEEDS,
)
from .neutral_fields import lenient_schema, without_neutral
from .structured import ResponseFormat, schema_of, schema_of_call

MAX_LOGPROBS = 20
MOST_STOP_STRINGS = 32
MOST_PROMPTS = 1 << 16
MOST_MESSAGES = 1 << 14
MOST_TOOLS = 256


RESERVED_FOR_TEMPLATES = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "conversations",
        "documents",
        "max_length",
        "messages",
        "padding",
        "processor_kwargs",
        "raise_exception",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "self",
        "strftime_now",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)
"""Names that a template's variables must not have: arguments of `apply_chat_template`, and template
functions."""


class StopAtFirstError(FailFast):
    """Checks a list only up to its first error: a body of a million wrong items must not become a million
    errors. Hashable, for unions.
    """

    def __hash__(self) -> int:
        return hash(self.fail_fast)


FIRST_ERROR = StopAtFirstError()
StopString = Annotated[str, Field(min_length=1, max_length=512)]
Stop = Annotated[
    Annotated[StopString, Tag("text")]
    | Annotated[list[StopString], FIRST_ERROR, Field(max_length=MOST_STOP_STRINGS), Tag("texts")],
    Discriminator(lambda stop: "texts" if isinstance(stop, list) else "text"),
]
"""The stop strings of a request. Every new text is searched for all of them."""
TokenIds = Annotated[list[Annotated[int, Field(ge=0, le=MOST_TOKENS)]], FIRST_ERROR]
LogitBias = Annotated[
    dict[Annotated[str, Field(pattern=r"^\d{1,10}$")], Annotated[float, Field(ge=-MOST_BIAS, le=MOST_BIAS)]],
    Field(max_length=MOST_BIASED_TOKENS),
]
"""Token ids, as strings since they are JSON keys, and the number that is added to each token's logit."""
Prompt = str | TokenIds | list[str] | list[TokenIds]


def _kind_of_prompt(prompt: object) -> str:
    """Return the kind of a prompt by its first item, so that a long list is checked for one kind only."""
    if not isinstance(prompt, list):
        return "text"
    first = prompt[0] if prompt else None
    return "texts" if isinstance(first, str) else "token_lists" if isinstance(first, list) else "tokens"


NotEmpty = Annotated[str, Field(min_length=1)]
CheckedPrompt = Annotated[
    Annotated[str, Field(min_length=1), Tag("text")]
    | Annotated[TokenIds, Field(min_length=1), Tag("tokens")]
    | Annotated[list[NotEmpty], FIRST_ERROR, Field(min_length=1, max_length=MOST_PROMPTS), Tag("texts")]
    | Annotated[
        list[Annotated[TokenIds, Field(min_length=1)]],
        FIRST_ERROR,
        Field(min_length=1, max_length=MOST_PROMPTS),
        Tag("token_lists"),
    ],
    Discriminator(_kind_of_prompt),
]


class Strict(BaseModel):
    """The base of models that refuse unknown keys and numbers in strings."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(Strict):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    """Whether every chunk has the usage so far, as in vLLM."""


class GenerationRequest(Strict):
    """The fields that requests for completions and for chats have in common. A field of None takes the
    model's own default, and null means None.
    """

    model_config = ConfigDict(
        extra="allow", strict=True, allow_inf_nan=False, json_schema_extra=lenient_schema
    )

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = Field(default=1, ge=1, le=128)
    max_tokens: int | None = Field(default=None, ge=0, le=MOST_TOKENS)
    """The most output tokens; 0 draws none, for requests that only ask for a prompt's logprobs."""
    temperature: float | None = Field(default=None, ge=0, le=MOST_TEMPERATURE)
    """The sampling temperature; below 1e-5 decoding is greedy, as with 0."""
    top_p: float | None = Field(default=None, ge=LEAST_TOP_P, le=1)
    top_k: int | None = Field(default=None, ge=-1, le=MOST_TOKENS)
    """How many of the most likely tokens may be drawn; 0, -1 and numbers above the vocabulary allow all."""
    min_p: float | None = Field(default=None, ge=0, le=1)
    seed: int | None = Field(default=None, ge=SEEDS.start, lt=SEEDS.stop)
    stop: Stop | None = None
    stop_token_ids: Annotated[TokenIds, Field(max_length=MOST_STOP_TOKEN_IDS)] | None = None
    ignore_eos: bool = False
    prompt_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    """How many logprobs to return for each token of the prompt, as in vLLM."""
    return_token_ids: bool = False
    """Whether each choice has the token ids of the prompt and of the output, as in vLLM."""
    skip_special_tokens: bool = True
    min_tokens: int = Field(default=0, ge=0, le=MOST_TOKENS)
    presence_penalty: float | None = Field(default=None, ge=-MOST_PENALTY, le=MOST_PENALTY)
    frequency_penalty: float | None = Field(default=None, ge=-MOST_PENALTY, le=MOST_PENALTY)
    repetition_penalty: float | None = Field(
        default=None, ge=REPETITION_PENALTIES[0], le=REPETITION_PENALTIES[1]
    )
    logit_bias: LogitBias | None = None
    response_format: ResponseFormat | None = None

    @property
    def answer_schema(self) -> dict[str, Any] | None:
        """Return the JSON schema that the answer has to satisfy."""
        return schema_of(self.response_format)

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, body: Any) -> Any:
        return without_neutral(body, cls.model_fields) if isinstance(body, dict) else body

    @property
    def unknown(self) -> list[str]:
        """Fields of the request that are not known."""
        return list(self.model_extra or ())

    @model_validator(mode="after")
    def _check(self) -> "GenerationRequest":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only for streaming; set stream to true")
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs are not streamed; set stream to false, or use echo")
        if self.min_tokens and self.answer_schema is not None:
            raise ValueError("an answer that follows a schema ends where that ends; leave min_tokens out")
        return self


class CompletionRequest(GenerationRequest):
    """`POST /v1/completions`."""

    prompt: CheckedPrompt
    add_special_tokens: bool = True
    """Whether the tokenizer adds its special tokens, such as BOS, to a prompt that is text."""
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    echo: bool = False

    @property
    def wanted_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def wanted_prompt_logprobs(self) -> int | None:
        """Return the number of log-probabilities for the prompt's tokens; echo shows them as well."""
        wanted = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((count for count in wanted if count is not None), default=None)

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """Return the prompts, as a list even if there is only one."""
        is_single = isinstance(self.prompt, str) or not isinstance(self.prompt[0], str | list)
        return [self.prompt] if is_single else self.prompt  # type: ignore[list-item, return-value]

    @property
    def num_prompts(self) -> int:
        return len(self.prompts)

    @property
    def text_length(self) -> int:
        """Return the number of characters to tokenize, plus the number of tokens to turn back into text for
        echo.
        """
        return sum(len(prompt) for prompt in self.prompts if isinstance(prompt, str) or self.echo)


class TextPart(Strict):
    type: Literal["text"]
    text: str

    @model_validator(mode="before")
    @classmethod
    def refuse_other_kinds(cls, part: Any) -> Any:
        """Refuse other kinds of content by name, since clients of multimodal models send images and audio."""
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind != "text":
            raise ValueError(f"this server reads text only; leave out the part of type {kind[:64]!r}")
        return part


Content = Annotated[
    Annotated[str, Tag("text")] | Annotated[list[TextPart], FIRST_ERROR, Tag("parts")],
    Discriminator(lambda content: "parts" if isinstance(content, list) else "text"),
]
"""The content of a message."""


class Function(BaseModel):
    """The function of a tool, or of a call, whose arguments are JSON."""

    model_config = ConfigDict(extra="allow", strict=True)

    name: str = Field(min_length=1, max_length=256)
    arguments: str | dict[str, Any] | None = None
    parameters: dict[str, Any] | None = None


class Tool(BaseModel):
    """A tool, or a call of one in an earlier message."""

    model_config = ConfigDict(extra="allow", strict=True)

    type: Literal["function"] = "function"
    function: Function

    def for_template(self) -> dict[str, Any]:
        """Return the call as it was sent, with its arguments as an object, which is the form that templates
        expect."""
        tool = self.model_dump(exclude_unset=True)
        arguments = self.function.arguments
        if isinstance(arguments, str):
            try:
                tool["function"]["arguments"] = json.loads(arguments)
            except (ValueError, RecursionError):
                return tool
        return tool


class NamedTool(Strict):
    name: str


class ChosenTool(Strict):
    type: Literal["function"]
    function: NamedTool


class Message(BaseModel):
    """Clients send back the fields of earlier answers in conversations; fields that no template reads are
    dropped.
    """

    model_config = ConfigDict(extra="ignore", strict=True)

    role: str
    content: Content | None = None
    name: str | None = None
    tool_calls: Annotated[list[Tool], FIRST_ERROR, Field(max_length=MOST_TOOLS)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    def for_template(self) -> dict[str, Any]:
        """Return the message in the form of chat templates; parts of text are joined."""
        content = self.content
        if isinstance(content, list):
            content = "\n".join(part.text for part in content)
        message: dict[str, Any] = {"role": self.role, "content": content}
        if self.tool_calls:
            message |= {"content": content or "", "tool_calls": [c.for_template() for c in self.tool_calls]}
        others = ("name", "tool_call_id", "reasoning_content")
        return message | {name: value for name in others if (value := getattr(self, name)) is not None}


class ChatCompletionRequest(GenerationRequest):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], FIRST_ERROR] = Field(min_length=1, max_length=MOST_MESSAGES)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=MOST_TOKENS)
    """The newer name of max_tokens."""
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    add_generation_prompt: bool = True
    add_special_tokens: bool = False
    """Whether the tokenizer adds its special tokens, such as BOS, to the text that the template has made."""
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[Tool], FIRST_ERROR, Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool = "auto"
    parallel_tool_calls: bool = True

    @property
    def offered_tools(self) -> list[Tool]:
        """Return the tools that the answer may call."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def must_call(self) -> bool:
        return bool(self.offered_tools) and self.tool_choice != "auto"

    @property
    def answer_schema(self) -> dict[str, Any] | None:
        """Return the schema of calls, if the answer must be calls."""
        if not self.must_call:
            return super().answer_schema
        chosen = self.tool_choice.function.name if isinstance(self.tool_choice, ChosenTool) else None
        functions = [t.function for t in self.offered_tools if chosen in (None, t.function.name)]
        most = {} if self.parallel_tool_calls and chosen is None else {"maxItems": 1}
        calls = [schema_of_call(function.name, function.parameters) for function in functions]
        return {"type": "array", "minItems": 1, **most, "items": {"anyOf": calls}}

    @property
    def wanted_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def wanted_prompt_logprobs(self) -> int | None:
        return self.prompt_logprobs

    @model_validator(mode="after")
    def _check_chat(self) -> "ChatCompletionRequest":
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs is only for logprobs; set logprobs to true")
        reserved = sorted(RESERVED_FOR_TEMPLATES & (self.chat_template_kwargs or {}).keys())
        if reserved:
            raise ValueError(
                f"chat_template_kwargs may not hold {', '.join(map(repr, reserved))}: the template is the "
                "model's own, and how it is run is the server's affair"
            )
        if isinstance(self.tool_choice, ChosenTool):
            name = self.tool_choice.function.name
            if name not in (tool.function.name for tool in self.tools or ()):
                raise ValueError(f"tool_choice is {name[:256]!r}, which is not among the tools")
        if self.tool_choice == "required" and not self.tools:
            raise ValueError("tool_choice is required, and there are no tools")
        both = self.max_tokens is not None and self.max_completion_tokens is not None
        if both and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens and max_completion_tokens differ; give one")
        return self


class TokenizeRequest(Strict):
    """The body of `POST /tokenize` of a text."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChatRequest(Strict):
    """The body of `POST /tokenize` of a conversation."""

    model: str | None = None
    messages: Annotated[list[Message], FIRST_ERROR] = Field(min_length=1, max_length=MOST_MESSAGES)
    add_generation_prompt: bool = True
    add_special_tokens: bool = False
    return_token_strs: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[Tool], FIRST_ERROR, Field(max_length=MOST_TOOLS)] | None = None

    @model_validator(mode="after")
    def _check_chat(self) -> "TokenizeChatRequest":
        self.chat()
        return self

    def chat(self) -> ChatCompletionRequest:
        """Return the chat request whose prompt is to be tokenized."""
        return ChatCompletionRequest(
            messages=self.messages,
            add_generation_prompt=self.add_generation_prompt,
            add_special_tokens=self.add_special_tokens,
            chat_template_kwargs=self.chat_template_kwargs,
            tools=self.tools,
        )


class DetokenizeRequest(Strict):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: TokenIds
