"""The engine's inputs and outputs, as plain data: picklable, no tensors."""

from dataclasses import dataclass, field
from typing import Literal

from ...base.errors import UserError
from .jit_monitor import JitEvent

FinishReason = Literal["stop", "length", "abort"]

LEAST_TEMPERATURE = 1e-5
"""Lower temperatures are greedy: logits divided by them could overflow float32. The same limit as vLLM's."""
MOST_TEMPERATURE = 100.0
MOST_TOKENS = 2**31 - 1
"""The largest max_tokens and top_k, since kernels read them as integers of fixed width."""
LEAST_TOP_P = 1e-6
"""The smallest top_p: sums of probabilities in float32 are not accurate enough for less."""
MOST_STOP_TOKEN_IDS = 1024
MOST_PENALTY = 2.0
"""The largest magnitude of presence and frequency penalties, as in OpenAI's API."""
REPETITION_PENALTIES = (0.01, 100.0)
MOST_BIAS = 100.0
MOST_BIASED_TOKENS = 1024
SEEDS = range(-(2**63), 2**63)


@dataclass(frozen=True)
class SamplingParams:
    """How one request's tokens are drawn. Temperature 0 is greedy, as is any temperature below
    LEAST_TEMPERATURE.

    A value outside its bounds raises UserError, so that later steps need not check values again.
    """

    max_tokens: int = 16
    """The most tokens to draw; 0 for requests that only want logprobs of the prompt."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """How many of the most likely tokens may be drawn; 0 for all."""
    min_p: float = 0.0
    seed: int | None = None
    logprobs: int | None = None
    """k asks for the log-probabilities of the drawn token and of the k most likely ones; None for none."""
    prompt_logprobs: int | None = None
    """The same for every token of the prompt but the first."""
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    presence_penalty: float = 0.0
    """Subtracted from the logit of each token that occurs in the output."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once for each of its occurrences in the output."""
    repetition_penalty: float = 1.0
    """Positive logits of tokens in prompt or output are divided by it, negative ones multiplied."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Tokens, each with a number that is added to its logit."""
    min_tokens: int = 0
    """No token that ends the output is drawn until the output has this many tokens."""
    grammar: str | None = None
    """A grammar that the output must follow, in llguidance's form."""

    def __post_init__(self) -> None:
        _require_whole("max_tokens", self.max_tokens, 0, MOST_TOKENS)
        _require_number("temperature", self.temperature, 0, MOST_TEMPERATURE)
        _require_number("top_p", self.top_p, LEAST_TOP_P, 1)
        _require_whole("top_k", self.top_k, 0, MOST_TOKENS)
        _require_number("min_p", self.min_p, 0, 1)
        if self.seed is not None:
            _require_whole("seed", self.seed, SEEDS.start, SEEDS.stop - 1)
        if self.logprobs is not None:
            _require_whole("logprobs", self.logprobs, 0, MOST_TOKENS)
        if self.prompt_logprobs is not None:
            _require_whole("prompt_logprobs", self.prompt_logprobs, 0, MOST_TOKENS)
        if len(self.stop_token_ids) > MOST_STOP_TOKEN_IDS:
            raise UserError(
                f"stop_token_ids has {len(self.stop_token_ids)} ids; at most {MOST_STOP_TOKEN_IDS} are taken"
            )
        for token in self.stop_token_ids:
            _require_whole("stop_token_ids", token, 0, MOST_TOKENS)
        _require_number("presence_penalty", self.presence_penalty, -MOST_PENALTY, MOST_PENALTY)
        _require_number("frequency_penalty", self.frequency_penalty, -MOST_PENALTY, MOST_PENALTY)
        _require_number("repetition_penalty", self.repetition_penalty, *REPETITION_PENALTIES)
        if len(self.logit_bias) > MOST_BIASED_TOKENS:
            raise UserError(
                f"logit_bias has {len(self.logit_bias)} tokens; at most {MOST_BIASED_TOKENS} are taken"
            )
        for token, bias in self.logit_bias:
            _require_whole("logit_bias", token, 0, MOST_TOKENS)
            _require_number("logit_bias", bias, -MOST_BIAS, MOST_BIAS)
        _require_whole("min_tokens", self.min_tokens, 0, self.max_tokens)
        if self.grammar is not None and (self.min_tokens or not isinstance(self.grammar, str)):
            raise UserError(
                "grammar must be a text, and cannot be combined with min_tokens; leave min_tokens out"
            )
        if self.temperature < LEAST_TEMPERATURE:
            object.__setattr__(self, "temperature", 0.0)

    @property
    def has_penalties(self) -> bool:
        """Say whether the request's logits depend on earlier tokens."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0, 0, 1)

    @property
    def adjusts_logits(self) -> bool:
        """Say whether the request's tokens are drawn from logits that differ from the model's."""
        is_limited = self.min_tokens > 0 or self.grammar is not None
        return is_limited or self.has_penalties or bool(self.logit_bias)


def _require_whole(name: str, value: object, least: int, most: int) -> None:
    if type(value) is not int or not least <= value <= most:
        raise UserError(f"{name} is {value!r}; it must be a whole number from {least} to {most}")


def _require_number(name: str, value: object, least: float, most: float) -> None:
    if type(value) not in (int, float) or not least <= value <= most:  # type: ignore[operator]
        raise UserError(f"{name} is {value!r}; it must be a number from {least:g} to {most:g}")


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities (nats) at one position: of its token, and of the most likely tokens, best first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int | None = None
    """The token's rank, 1 for the most likely; only for tokens of prompts."""


@dataclass(frozen=True)
class StepOutput:
    """The output of one engine step for one request."""

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    """The logprobs of the prompt's tokens from the second on, in a request's first output, if it asks for
    them."""


@dataclass(frozen=True)
class EngineCapacity:
    """The limits of an engine, fixed when it is built."""

    max_num_seqs: int
    """The most requests that decode together."""
    kv_cache_pages: int
    page_size: int
    """Number of tokens in a page."""
    kv_cache_dtype: str = "unquantized"
    packed_layers: dict[str, int] = field(default_factory=dict)
    """The number of packed weights by layout and shape, by names such as `swap_ab 4096x4096`."""
    device: str = ""
    """The model of the GPU or CPU, as named in layout plans."""
    page_bytes: int = 0
    """Of a page, in all layers."""
    row_bytes: int = 0
    """Of a request besides its pages and states, in all layers."""
    state_bytes: dict[str, int] = field(default_factory=dict)
    """Of a request's states in all layers, by state format and dtype, as `mamba2 float32`."""
    emulated_inputs: dict[tuple[str, str], int] = field(default_factory=dict)
    """How many products emulate a format of inputs, by its label and the hardware that multiplies it."""

    @property
    def kv_cache_tokens(self) -> int:
        return self.kv_cache_pages * self.page_size


@dataclass(frozen=True)
class StepTimes:
    """Where the engine's time went, in seconds since warm-up."""

    step_seconds: float = 0.0
    """Seconds in steps, each from its beginning to its end."""
    host_seconds: float = 0.0
    """Seconds in steps, without waiting for the GPU or, on a CPU, without running the model."""
    device_busy_seconds: float | None = None
    """Seconds on the device from the start to the end of each launch; None without a GPU."""
    device_idle_seconds: float | None = None
    """Seconds on the device between two launches while there were requests to serve; None without a GPU."""


@dataclass(frozen=True)
class EngineStats:
    """The figures of an engine at one moment, with the names used in the report and in `/metrics`."""

    running: int
    waiting: int
    kv_cache_usage: float
    """The share of the pool's pages that is in use, 0 to 1."""
    preemptions: int
    prompt_tokens: int
    generation_tokens: int
    steps: int
    times: StepTimes = field(default_factory=StepTimes)
    waiting_by_step: int = 0
    """Waiting requests, summed over all steps. Divided by `steps`, it is their mean number."""
    running_by_step: tuple[int, ...] = field(default=())
    """The number of decoding requests in each step since the last snapshot: the actual M."""
    compilations: tuple[JitEvent, ...] = field(default=())
    """Compilations since the last snapshot, after warm-up."""
