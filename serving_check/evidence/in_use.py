"""What a load as in use showed: the speed of both servers, and the artifact's answers beside its own logits.

`gate/in_use.py` measures it, `checks/` judge it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..settings import DOCUMENTED
from .gaps import Gap

PIT_BINS = 20


@dataclass(frozen=True)
class SideInUse:
    """One server under one open loop."""

    __pydantic_config__ = DOCUMENTED

    began: float
    """Seconds, on a clock that all repeats of a run share."""
    duration: float
    """Seconds from the first send to the last end."""
    output_tokens: int
    ttfts: tuple[float | None, ...]
    """Seconds to the first token, by request; null where there was none."""
    tpots: tuple[float | None, ...]
    """Seconds per output token after the first, by request; null where there were too few."""
    itls_by_m: Mapping[int, tuple[int, float]]
    """By how many requests were decoding: gaps between chunks of a stream, and their mean in seconds."""
    gaps: tuple[Gap, ...] = ()
    """Times in which no stream moved although requests were open, the longest of them, longest first."""
    preemptions: int | None = None
    errors: tuple[str, ...] = ()
    """Of each request that failed."""
    not_as_asked: tuple[str, ...] = ()
    """Of each answer that is not what its request asked for, in a few words."""


@dataclass(frozen=True)
class BlockInUse:
    """The same requests at the same times, sent to the artifact's server and to the baseline's."""

    __pydantic_config__ = DOCUMENTED

    requests: int
    artifact: SideInUse
    baseline: SideInUse


@dataclass(frozen=True)
class Draws:
    """Sampled tokens of one answer beside the probabilities that they should have been drawn with."""

    __pydantic_config__ = DOCUMENTED

    tokens: int
    nats: float
    """-log p of the drawn tokens, summed."""
    surprisal: float
    """Nats: -log p of the drawn tokens minus the entropy of their distributions, summed."""
    variance: float
    """Of -log p under these distributions, summed: of `surprisal`, if tokens are drawn as they should be."""
    bins: tuple[int, ...]
    """Tokens by their randomized probability integral transform, in equal bins from 0 to 1."""


@dataclass(frozen=True)
class AnswerInUse:
    """One answer of the artifact's server under a load as in use, held to logits computed in process."""

    __pydantic_config__ = DOCUMENTED

    kind: str
    prompt_tokens: int
    tokens: int
    m: float
    """Requests that decoded together, itself included, as its average token saw it."""
    prompts_beside: int
    """Other requests whose prompt was read while it decoded."""
    off: int
    """Tokens too far below the artifact's best logit to be explained by rounding; of a sampled answer, those
    that were drawn although others are surely more likely."""
    baseline_off: int
    """The same of a greedy answer under the baseline's logits; 0 for a sampled one."""
    beginning: str
    """The first characters of the text."""
    draws: Draws | None = None
    """Null for an answer that was not sampled."""
    logprob_errors: tuple[float, float] | None = None
    """Nats by which the told log-probabilities differ, mean and largest; null where none were asked for."""
    repeats_other_seed: bool | None = None
    """Whether a sampled answer equals an earlier one to the same prompt with another seed; null if there is
    none."""


@dataclass(frozen=True)
class FiguresInUse:
    """All of a stage as in use."""

    __pydantic_config__ = DOCUMENTED

    blocks: tuple[BlockInUse, ...]
    answers: tuple[AnswerInUse, ...] = ()
    unknown: tuple[str, ...] = field(default=())
    """What the artifact's server cannot be asked, in a few words each."""
