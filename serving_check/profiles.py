"""Profiles of loads: how long the prompts and the answers of a kind of service are, by public traces.

The requests that are sent are in `workload/profile_plan.py`. Prompts and answers are drawn independently: the
logarithms of their lengths correlate by 0.09 (chat), 0.00 (code) and 0.49 (rag) in these traces.
"""

import math
from dataclasses import dataclass
from itertools import pairwise

from ..base.registry import Registry

STEPS = 1000
"""Number of parts into which a distribution is divided to compute its mean."""


@dataclass(frozen=True)
class Lengths:
    """A distribution of lengths in tokens: quantiles of a trace, and log-uniform between two of them.

    The distribution ends at the 99th percentile, so that a single outlier does not set the longest request.
    """

    quantiles: tuple[tuple[float, int], ...]
    """Quantiles: a share of the requests, ascending from 0 to 1, and the most tokens that this share has."""

    def at(self, share: float) -> float:
        """Return the length that this share of the requests has at most."""
        (low, shorter), (high, longer) = next(
            pair for pair in pairwise(self.quantiles) if share <= pair[1][0]
        )
        return shorter * (longer / shorter) ** ((share - low) / (high - low))

    @property
    def mean(self) -> float:
        return math.fsum(self.at((step + 0.5) / STEPS) for step in range(STEPS)) / STEPS

    @property
    def longest(self) -> int:
        return self.quantiles[-1][1]


@dataclass(frozen=True)
class Profile:
    """The lengths of one kind of service."""

    source: str
    """The trace, as a report names it."""
    prompts: Lengths
    answers: Lengths

    @property
    def longest_request(self) -> int:
        return self.prompts.longest + self.answers.longest


AZURE_2023 = "Azure LLM inference trace 2023"
"""https://github.com/Azure/AzurePublicDataset; Patel et al., Splitwise, ISCA 2024."""

PROFILES: Registry[Profile] = Registry("profile")
PROFILES.add(
    "chat",
    # AzureLLMInferenceTrace_conv.csv, 19,366 requests.
    Profile(
        f"{AZURE_2023}, conversation",
        Lengths(
            (
                (0.0, 29),
                (0.05, 181),
                (0.1, 207),
                (0.25, 396),
                (0.5, 1020),
                (0.75, 1189),
                (0.9, 2735),
                (1.0, 4142),
            )
        ),
        Lengths(((0.0, 16), (0.1, 54), (0.25, 85), (0.5, 129), (0.75, 395), (0.9, 424), (1.0, 601))),
    ),
)
PROFILES.add(
    "rag",
    # https://github.com/flashserve/RAGPulse, 0_trace.jsonl, 7,106 requests; Wang et al., arXiv:2511.12979.
    Profile(
        "RAGPulse, questions answered from documents",
        Lengths(
            ((0.0, 1052), (0.1, 1110), (0.25, 2754), (0.5, 3140), (0.75, 3437), (0.9, 3959), (1.0, 5439))
        ),
        Lengths(((0.0, 36), (0.1, 83), (0.25, 131), (0.5, 234), (0.75, 385), (0.9, 563), (1.0, 891))),
    ),
)
PROFILES.add(
    "code",
    # AzureLLMInferenceTrace_code.csv, 8,819 requests.
    Profile(
        f"{AZURE_2023}, code completion",
        Lengths(
            (
                (0.0, 17),
                (0.05, 75),
                (0.1, 147),
                (0.25, 578),
                (0.5, 1469),
                (0.75, 2745),
                (0.9, 5194),
                (1.0, 7436),
            )
        ),
        Lengths(((0.0, 6), (0.1, 7), (0.25, 9), (0.5, 13), (0.75, 24), (0.9, 55), (1.0, 252))),
    ),
)
