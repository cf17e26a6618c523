"""What goes into the engine and what comes out of it; plain data, picklable, no tensors."""

from dataclasses import dataclass, field
from typing import Literal

from ...layouts.errors import UserError
from .jit_monitor import JitEvent

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class SamplingParams:
    """How one request's tokens are drawn. Temperature 0 is greedy."""

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps every token."""
    min_p: float = 0.0
    seed: int | None = None
    logprobs: int | None = None
    """None for none; otherwise the drawn token's log-probability and the k most likely tokens'."""
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _require(self.max_tokens >= 1, "max_tokens", self.max_tokens, "at least 1")
        _require(0 <= self.temperature < float("inf"), "temperature", self.temperature, "0 (greedy) or more")
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1")
        _require(self.top_k >= 0, "top_k", self.top_k, "0 (all tokens) or more")
        _require(0 <= self.min_p <= 1, "min_p", self.min_p, "between 0 and 1")
        _require(self.logprobs is None or self.logprobs >= 0, "logprobs", self.logprobs, "0 or more")


def _require(holds: bool, name: str, value: object, valid: str) -> None:
    if not holds:
        raise UserError(f"{name} is {value}; it must be {valid}")


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities (nats) at one position: the drawn token's, and the most likely ones', best first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class StepOutput:
    """What one engine step gave one request."""

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None


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
