"""Figures of how close a model's predictions are to its baseline's: verdicts hold these figures, and cards
read them.

`quality.py` measures the figures, which needs torch; reading a verdict does not.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Comparison:
    """A model against its baseline on the same tokens; KL is of the model from the baseline, in nats."""

    tokens: int
    nats_per_token: float
    baseline_nats_per_token: float
    mean_kl: float
    p99_kl: float
    p999_kl: float
    max_kl: float
    top1_agreement: float
    """Share of positions where both models put the same token first."""
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """95% confidence limits of the figures above and of `extra_nats_per_token`, by name; figures that are not
    finite have none, nor have figures of fewer than two runs of tokens."""
    baseline_entropy: float | None = None
    """The entropy of the baseline's predictions in nats, mean over positions: how uncertain the text is."""

    @property
    def extra_nats_per_token(self) -> float:
        return self.nats_per_token - self.baseline_nats_per_token
