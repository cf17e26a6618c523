"""The settings of a gate run: the requests to send to the servers and the bounds for the artifact.

An option of the workload is a field here and nowhere else: the command lines, the Python signatures, the
verdict's record and the card's command are made from it. A recipe may tighten (or, openly, loosen) any bound;
the bounds that are options can also be given on the command line.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from pydantic import ConfigDict

from ..base.errors import UserError
from ..base.option_fields import check_options, option, text_of
from .profiles import PROFILES
from .statistics.ms_between import draw_between

DOCUMENTED = ConfigDict(use_attribute_docstrings=True, extra="forbid")
"""For dataclasses that are written as JSON: attribute docstrings become the schema's descriptions."""
QUALITY_TOKENS = 8192
"""The default number of held-out tokens on which quality is measured."""
LARGEST_BOUND = 1e6
"""Every bound must be below this number: a larger one, or infinity or NaN, would have no effect."""


MS, MS_OF_LONG_PROMPTS = (1, 2, 4, 8, 16, 32), (1, 8, 32)
LONG_PROMPT = 1024
"""If prompts have more tokens than this, fewer Ms are measured, since prefill takes most of the time."""
SHORTER = 4
"""Requests at drawn Ms have this many times fewer tokens than at given Ms, in prompt and answer alike. All
drawn Ms together then cost about as much as one more given M."""
LEAST_SHORT = 16
"""The least number of output tokens of a request at a drawn M, if requests at given Ms have as many."""


def default_ms(input_len: int) -> tuple[int, ...]:
    """Return the Ms of a workload whose prompts have `input_len` tokens; the release policy allows both
    choices.
    """
    return MS if input_len <= LONG_PROMPT else MS_OF_LONG_PROMPTS


@dataclass(frozen=True)
class WorkloadSettings:
    """The requests that are sent, the same to both sides. Changing any of these settings changes the meaning
    of a verdict.
    """

    __pydantic_config__ = DOCUMENTED

    ms: tuple[int, ...] = option(
        MS,
        "Numbers of requests that decode together.",
        name="m",
        minimum=1,
        any_order=True,
        unless_given=f"{text_of(MS)}; {text_of(MS_OF_LONG_PROMPTS)} if prompts exceed {LONG_PROMPT} tokens",
    )
    input_len: int = option(
        64,
        "Prompt tokens per request.",
        minimum=1,
        unless_given="64; with a KVarN cache, enough to exercise quantized pages",
    )
    output_len: int = option(64, "Output tokens per request.", minimum=1)
    waves: int = option(
        1,
        "Requests that each client sends in one repeat; short repeats resist noise best.",
        minimum=1,
    )
    max_blocks: int = option(
        96,
        "The most blocks, each one repeat per side, to measure at one M before that M is inconclusive.",
        formerly="max_repeats",
        minimum=1,
    )
    warmups: int = option(
        1, "Shorter repeats per side that warm up the servers before the first block of each M.", minimum=0
    )
    seed: int = option(
        0,
        "Seed of the prompts; every repeat draws new prompts, the same for both sides.",
        unless_given="a fresh number, which the verdict records",
    )
    profile: str | None = option(
        None,
        "Also measure requests with the lengths of a real service; judge prefill and decoding separately.",
        choices=lambda: PROFILES,
        unless_given="the recipe's profile, if any",
    )
    decoding_apart: bool = False
    """Decide on decoding by itself at every M. Only verdicts from before shares of the time were recorded ask
    for it: parts of requests are now judged by themselves by what they take of the baseline's time."""
    draws_between: bool = False
    """Whether Ms between those given are drawn from the seed and measured as well, with shorter requests."""

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def ms_between(self) -> tuple[int, ...]:
        """Return the drawn Ms."""
        return draw_between(self.ms, self.seed) if self.draws_between else ()

    @property
    def measured_ms(self) -> tuple[int, ...]:
        """Return the given and the drawn Ms, ascending."""
        return tuple(sorted({*self.ms, *self.ms_between}))

    @property
    def with_short_answers(self) -> "WorkloadSettings":
        """Return the settings with a quarter of the output tokens, for blocks that only prompts are judged
        by."""
        short = max(self.output_len // SHORTER, min(self.output_len, LEAST_SHORT))
        return replace(self, output_len=short)

    def at(self, m: int) -> "WorkloadSettings":
        """Return the settings with the requests sent at `m`: shorter requests if `m` was drawn."""
        if m in self.ms:
            return self
        output_len = self.with_short_answers.output_len
        input_len = max(1, self.input_len * output_len // self.output_len)
        return replace(self, input_len=input_len, output_len=output_len)


@dataclass(frozen=True)
class Bounds:
    """The bounds that the artifact must reach. The defaults suit a 4-bit checkpoint, and belong to the
    release policy.

    A bound whose name begins with `max_` is easier to meet when it is higher, any other when it is lower.
    """

    __pydantic_config__ = DOCUMENTED

    throughput_floor: float = option(
        0.93,
        "The least output throughput at every M, as a share of the baseline's.",
        name="floor",
        above=0,
        unless_given="the recipe's floor, or 0.93",
    )
    max_mean_kl: float = 0.1
    """Most nats by which the next-token distribution may differ from the baseline's, on average."""
    max_p999_kl: float = 2.5
    """Most nats at the 99.9th percentile over held-out tokens: the largest divergence of nearly every
    token."""
    max_max_kl: float = 8.0
    """Most nats at any one held-out token."""
    max_extra_nats: float = 0.08
    """Most nats per token that the held-out text may cost beyond the baseline."""
    min_top1_agreement: float = 0.85
    """Least share of positions at which both put the same token first."""
    max_canary_extra_nats: float = 0.5
    """Most nats per token by which the artifact's greedy text may be less likely to the baseline than the
    baseline's own greedy text."""
    max_tpot_ratio: float = 1.5
    """Most time per output token of the slowest requests, artifact over baseline, at every M."""
    max_ttft_ratio: float = 2.0
    """Most time to first token of the slowest requests, artifact over baseline, at every M."""
    max_itl_ratio: float = 3.0
    """Most time between two chunks at a repeat's 99.9th percentile, artifact over baseline, at every M."""
    max_speedup: float = 3.0
    """Largest throughput ratio times the ratio of the weights' bytes: faster answers cannot have been
    computed."""
    max_foreign_tokens: float = 0.02
    """Largest share of served greedy tokens that the artifact's own logits do not put first."""
    max_foreign_text: float = 0.125
    """The same share in any single text."""
    max_duplicates: float = 0.1
    """Largest share of answers under load that equal another answer, beyond the baseline's share."""
    max_one_token: float = 0.05
    """Largest share of answers under load that repeat a single token, beyond the baseline's share."""
    min_variety: float = 0.5
    """Least share of an answer's tokens that are distinct, artifact over baseline."""
    max_first_rival_m: float = option(
        4.0,
        "The least M at which the artifact must be faster than the rival, if there is a rival.",
        name="rival_from_m",
        minimum=1,
        unless_given="the recipe's value, or 4",
    )
    min_reached: float = 0.75
    """Least number of requests that decode together, mean over output tokens, as a share of M."""

    def __post_init__(self) -> None:
        # What is not a number is above no bound and below none: every check would hold.
        for field in fields(self):
            checked_bound(field.name, getattr(self, field.name))

    @classmethod
    def from_recipe(cls, recipe: Mapping[str, Any]) -> "Bounds":
        """Return the defaults, with the recipe's values under the same names."""
        names = {field.name for field in fields(cls)}
        changes = {name: value for name, value in recipe.items() if name in names and value is not None}
        return replace(cls(), **{name: checked_bound(name, value) for name, value in changes.items()})


def checked_bound(name: str, value: object) -> float:
    """Return `value` as a bound. A value that is not a number in the allowed range raises UserError."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < LARGEST_BOUND:
        raise UserError(
            f"the bound {name} must be a number above 0 and below {LARGEST_BOUND:g}, not {value!r}"
        )
    return float(value)
