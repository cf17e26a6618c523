"""What goes into the engine and what comes out of it; plain data, picklable, no tensors."""

from dataclasses import dataclass, field
from typing import Literal

from ...base.errors import UserError
from .jit_monitor import JitEvent

FinishReason = Literal["stop", "length", "abort"]

LEAST_TEMPERATURE = 1e-5
"""Anything below is greedy: divided by it, logits would leave float32 (vLLM draws the same line)."""
MOST_TEMPERATURE = 100.0
MOST_TOKENS = 2**31 - 1
"""Of max_tokens and top_k, which kernels read as whole numbers of fixed width."""
LEAST_TOP_P = 1e-6
"""Less than any float32 sum of probabilities can tell from nothing."""
MOST_STOP_TOKEN_IDS = 1024
MOST_PENALTY = 2.0
"""Of presence and frequency, either way, as OpenAI has it."""
REPETITION_PENALTIES = (0.01, 100.0)
MOST_BIAS = 100.0
MOST_BIASED_TOKENS = 1024
SEEDS = range(-(2**63), 2**63)


@dataclass(frozen=True)
class SamplingParams:
    """How one request's tokens are drawn. Temperature 0 is greedy, and so is one below LEAST_TEMPERATURE.

    UserError for a value outside its bounds: what is in here, every step can compute with.
    """

    max_tokens: int = 16
    """0 draws none, where only the prompt is of interest."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps every token."""
    min_p: float = 0.0
    seed: int | None = None
    logprobs: int | None = None
    """None for none; otherwise the drawn token's log-probability and the k most likely tokens'."""
    prompt_logprobs: int | None = None
    """The same for every token of the prompt but the first."""
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    presence_penalty: float = 0.0
    """Taken from the logit of each token that the output has."""
    frequency_penalty: float = 0.0
    """Taken from a token's logit as often as the output has it."""
    repetition_penalty: float = 1.0
    """Positive logits of tokens in prompt or output are divided by it, negative ones multiplied."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Tokens, and what is added to their logits."""
    min_tokens: int = 0
    """Until then, no token that would end the output is drawn."""
    grammar: str | None = None
    """What the output has to follow, in llguidance's form."""

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
            raise UserError("grammar is a text, and its output may end before min_tokens; leave those out")
        if self.temperature < LEAST_TEMPERATURE:
            object.__setattr__(self, "temperature", 0.0)

    @property
    def has_penalties(self) -> bool:
        """Whether its logits depend on the tokens before."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0, 0, 1)

    @property
    def adjusts_logits(self) -> bool:
        """Whether its tokens are drawn from other logits than the model's."""
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
    """Log-probabilities (nats) at one position: the token's there, and the most likely ones', best first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int | None = None
    """1 for the most likely token; known for tokens of prompts."""


@dataclass(frozen=True)
class StepOutput:
    """What one engine step gave one request."""

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    """With the first output of a request that asks for them: of its prompt's tokens from the second on."""


@dataclass(frozen=True)
class EngineCapacity:
    """What an engine holds and can hold, fixed when it is built."""

    max_num_seqs: int
    """The most requests that decode together."""
    kv_cache_pages: int
    page_size: int
    """Tokens a page holds."""
    kv_cache_dtype: str = "unquantized"
    packed_layers: dict[str, int] = field(default_factory=dict)
    """Packed linears of the model by layout and shape, as `swap_ab 4096x4096`."""
    device: str = ""
    """The model of the GPU or CPU, as layout plans name it."""

    @property
    def kv_cache_tokens(self) -> int:
        return self.kv_cache_pages * self.page_size


@dataclass(frozen=True)
class StepTimes:
    """Where the engine's time went, in seconds since warm-up."""

    step_seconds: float = 0.0
    """In steps, from the beginning of each to its end."""
    host_seconds: float = 0.0
    """Of these, all but waiting for the GPU; on a CPU, all but the model's own work."""
    device_busy_seconds: float | None = None
    """From the start to the end of each launched piece of work; None without a GPU."""
    device_idle_seconds: float | None = None
    """Between two such pieces, while there were requests to serve."""


@dataclass(frozen=True)
class EngineStats:
    """One snapshot, under the names the report and `/metrics` use."""

    running: int
    waiting: int
    kv_cache_usage: float
    """Pages in use over pages in the pool, 0..1."""
    preemptions: int
    prompt_tokens: int
    generation_tokens: int
    steps: int
    times: StepTimes = field(default_factory=StepTimes)
    waiting_by_step: int = 0
    """Requests that waited, summed over all steps: divided by `steps`, how many waited on average."""
    running_by_step: tuple[int, ...] = field(default=())
    """How many requests decoded in each step since the last snapshot: what M really was."""
    compilations: tuple[JitEvent, ...] = field(default=())
    """What was compiled since the last snapshot, though warm-up was over."""
