"""The API process's view of the model: its name, tokenizer, limits and its maker's sampling defaults.

The weights are in the engine's process.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..engine.request import SamplingParams
from .errors import ApiError
from .model_description import SamplingDefaults
from .schema import ChatCompletionRequest, CompletionRequest
from .tool_calls import FORMATS, ToolFormat, format_of

COMPLETION_MAX_TOKENS = 16
"""The default number of output tokens for /v1/completions, as in OpenAI's API; chat has no such limit."""


@dataclass(frozen=True)
class ServedModel:
    """One model behind one server."""

    name: str
    tokenizer: Any | None
    """A transformers tokenizer; None serves token ids only."""
    max_model_len: int
    """The most tokens of a request, prompt and output together."""
    vocab_size: int
    """Rows of the embedding; a token id at or above it would end the engine, not the request."""
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)

    @functools.cached_property
    def most_characters(self) -> int:
        """Return the most characters of a prompt: a longer text always has more tokens than the context."""
        vocabulary = {} if self.tokenizer is None else self.tokenizer.get_vocab()
        return self.max_model_len * max(map(len, vocabulary), default=1)

    def prompts_of(self, request: CompletionRequest) -> list[list[int]]:
        """Return the request's prompts as token ids."""
        if any(isinstance(prompt, str) for prompt in request.prompts):
            self._tokenizer("prompt")
        prompts = encode_prompts(self.tokenizer, request, self.most_characters)[0]
        self.check_prompts(prompts)
        return prompts

    def prompt_texts(self, request: CompletionRequest) -> list[str] | None:
        """Return the text that `echo` puts before each sequence: the prompt as it was sent, or the text of
        its tokens.
        """
        return echoed(self._tokenizer("echo"), request) if request.echo else None

    def check_prompts(self, prompts: Sequence[Sequence[int]]) -> None:
        """Refuse token ids that the model does not have."""
        for prompt in prompts:
            self.check_token_ids(prompt, "prompt")

    @functools.cached_property
    def tool_format(self) -> ToolFormat | None:
        """Return how the model writes calls of tools; None if its template has no tools."""
        template = getattr(self.tokenizer, "chat_template", None)
        return format_of("".join(template.values()) if isinstance(template, dict) else template)

    def check_chat(self, request: ChatCompletionRequest) -> None:
        """Refuse messages if there is no template for them, and tools if the template has none."""
        if not getattr(self._tokenizer("messages"), "chat_template", None):
            raise ApiError(
                f"{self.name} has no chat template, so it cannot take messages; use /v1/completions",
                param="messages",
                code="no_chat_template",
            )
        if request.offered_tools and self.tool_format is None:
            known = ", ".join(form.name for form in FORMATS)
            raise ApiError(
                f"the chat template of {self.name} takes no tools in a form that this server can read "
                f"({known}); leave tools out",
                param="tools",
                code="unsupported_parameter",
            )

    def sampling_params(
        self,
        request: CompletionRequest | ChatCompletionRequest,
        prompt_len: int,
        grammar: str | None = None,
    ) -> SamplingParams:
        """Return the request's settings over the model's defaults; refuse a request that does not fit the
        context.

        grammar: the grammar of the request's schema, if it has one
        """
        defaults = self.defaults
        self.check_token_ids(request.stop_token_ids or (), "stop_token_ids")
        biases = {int(token): bias for token, bias in (request.logit_bias or {}).items()}
        self.check_token_ids(tuple(biases), "logit_bias")
        top_k = defaults.top_k if request.top_k is None else request.top_k
        max_tokens = self._max_tokens(request, prompt_len)
        if request.min_tokens > max_tokens:
            raise ApiError(
                f"min_tokens is {request.min_tokens}, but at most {max_tokens} tokens are drawn; lower it",
                param="min_tokens",
            )
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=_first(request.temperature, defaults.temperature),
            top_p=_first(request.top_p, defaults.top_p),
            top_k=0 if top_k >= self.vocab_size else max(top_k, 0),
            min_p=_first(request.min_p, defaults.min_p),
            seed=request.seed,
            logprobs=request.wanted_logprobs,
            prompt_logprobs=request.wanted_prompt_logprobs,
            ignore_eos=request.ignore_eos,
            stop_token_ids=tuple(request.stop_token_ids or ()),
            presence_penalty=_first(request.presence_penalty, 0.0),
            frequency_penalty=_first(request.frequency_penalty, 0.0),
            repetition_penalty=_first(request.repetition_penalty, defaults.repetition_penalty),
            logit_bias=tuple(biases.items()),
            min_tokens=request.min_tokens,
            grammar=grammar,
        )

    def _max_tokens(self, request: CompletionRequest | ChatCompletionRequest, prompt_len: int) -> int:
        room = self.max_model_len - prompt_len
        if prompt_len == 0:
            raise ApiError("the prompt has no tokens; send at least one", param="prompt")
        if room < (0 if request.max_tokens == 0 else 1):
            raise ApiError(
                f"the prompt has {prompt_len} tokens and this model's context is {self.max_model_len}, "
                "output included; shorten the prompt",
                param="prompt" if isinstance(request, CompletionRequest) else "messages",
                code="context_length_exceeded",
            )
        asked = request.max_tokens
        if isinstance(request, ChatCompletionRequest) and asked is None:
            asked = request.max_completion_tokens
        if asked is None:
            usual = COMPLETION_MAX_TOKENS if isinstance(request, CompletionRequest) else math.inf
            return int(min(room, usual, _first(self.defaults.max_tokens, math.inf)))
        if asked > room:
            raise ApiError(
                f"the prompt has {prompt_len} tokens and {asked} more were asked for, "
                f"but this model's context is {self.max_model_len}; ask for at most {room}",
                param="max_tokens",
                code="context_length_exceeded",
            )
        return asked

    def check_token_ids(self, token_ids: Sequence[int], param: str) -> None:
        """Refuse ids that the model does not have."""
        highest = max(token_ids, default=0)
        if highest >= self.vocab_size:
            raise ApiError(
                f"token id {highest} is outside this model's vocabulary of {self.vocab_size}", param=param
            )

    def _tokenizer(self, param: str) -> Any:
        if self.tokenizer is None:
            raise ApiError(f"{self.name} has no tokenizer; send the prompt as token ids", param=param)
        return self.tokenizer


def encode_prompts(
    tokenizer: Any, request: CompletionRequest, most_characters: int
) -> tuple[list[list[int]], list[str] | None]:
    """Return the request's prompts as token ids, and the texts that `echo` shows."""
    special = request.add_special_tokens
    prompts = [
        _encode(tokenizer, prompt, most_characters, "prompt", special) if isinstance(prompt, str) else prompt
        for prompt in request.prompts
    ]
    return prompts, echoed(tokenizer, request) if request.echo else None


def echoed(tokenizer: Any, request: CompletionRequest) -> list[str]:
    texts = [prompt if isinstance(prompt, str) else tokenizer.decode(prompt) for prompt in request.prompts]
    return [text for text in texts for _ in range(request.n)]


def encode_chat(tokenizer: Any, request: ChatCompletionRequest, most_characters: int) -> list[int]:
    """Render the conversation through the tokenizer's own template, as token ids."""
    try:
        text = tokenizer.apply_chat_template(
            [message.for_template() for message in request.messages],
            tokenize=False,
            add_generation_prompt=request.add_generation_prompt,
            tools=[tool.for_template() for tool in request.offered_tools] or None,
            **(request.chat_template_kwargs or {}),
        )
    except MemoryError:
        raise
    except Exception as error:  # a template is a program of its maker's and may raise anything
        message = f"the chat template refuses these messages: {error}"[:1000]
        raise ApiError(message, param="messages") from error
    return _encode(tokenizer, text, most_characters, "messages", request.add_special_tokens)


def encode_text(tokenizer: Any, text: str, add_special_tokens: bool) -> list[int]:
    """Return the tokens of a text, for `/tokenize`. The size of the request's body limits the text."""
    return list(tokenizer.encode(text, add_special_tokens=add_special_tokens))


def decode_tokens(tokenizer: Any, token_ids: list[int]) -> str:
    """Return the text of tokens, special tokens included, for `/detokenize`."""
    return str(tokenizer.decode(token_ids))


def _encode(
    tokenizer: Any, text: str, most_characters: int, param: str, add_special_tokens: bool
) -> list[int]:
    if len(text) > most_characters:
        raise ApiError(
            f"the prompt has {len(text)} characters, more than this model's context can hold; "
            "shorten the prompt",
            param=param,
            code="context_length_exceeded",
        )
    return list(tokenizer.encode(text, add_special_tokens=add_special_tokens))


def _first(value: Any, default: Any) -> Any:
    return default if value is None else value
