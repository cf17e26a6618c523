"""The text that a user gives to be measured besides Scalegate's own, and the least that such a text must
have.

A text that is too short or too predictable is refused, rather than making the verdict exploratory: a user who
gives a text wants it measured, and should learn at once what is wrong with it.
"""

from pathlib import Path

from ...base.errors import UserError
from ...serving_check.evidence.quality_figures import Comparison
from ...serving_check.gate.policy import POLICY
from ..checkpoints.checkpoint import Checkpoint
from .held_out import HeldOutText, read_held_out

LEAST_TOKENS = 1000
"""The least number of predicted tokens: with fewer, the 99.9th percentile would be the largest divergence."""
LEAST_DISTINCT = 100
"""The least number of distinct tokens: less than half as many as the first 1,000 tokens of any domain of
Scalegate's own text have, which is at least 232 with the bundled checkpoint's vocabulary."""
LEAST_CONTEXT = POLICY.least_input_len
"""The least mean number of tokens before a predicted token: the release policy's least prompt length."""
LEAST_ENTROPY = 0.1
"""Nats of the baseline's predictions, on average: the bound on the mean divergence. The divergence of sound
INT4 and NVFP4 artifacts is 1% to 3% of the entropy, so on less than this many a far worse one would pass."""


def read_given(
    path: Path, artifact: Checkpoint, baseline: Checkpoint, tokens: int, window: int, prompt: int
) -> HeldOutText:
    """As `read_held_out`. Raise UserError if the text is too short, or repeats itself."""
    text = read_held_out(path, artifact, baseline, tokens, window, prompt)
    predicted = sum(len(window) - 1 for window in text.windows)
    if predicted < LEAST_TOKENS:
        raise _too_little(path, f"{predicted} tokens to predict", f"{LEAST_TOKENS}", "give a longer one")
    distinct = len({token for window in text.windows for token in window.tolist()})
    if distinct < LEAST_DISTINCT:
        raise _too_little(path, f"{distinct} different tokens", f"{LEAST_DISTINCT}", "it repeats itself")
    context = sum(len(window) * (len(window) - 1) / 2 for window in text.windows) / predicted
    if context < LEAST_CONTEXT:
        found = f"{context:.0f} tokens before a predicted one, on average"
        raise _too_little(path, found, f"{LEAST_CONTEXT}", "its documents are short: join them")
    return text


def require_doubt(path: Path, figures: Comparison) -> None:
    """Raise UserError if the baseline is so sure of the text that no artifact could differ from it."""
    entropy = figures.baseline_entropy
    if entropy is not None and entropy < LEAST_ENTROPY:
        found = f"{entropy:.3f} nats of entropy in the baseline's predictions"
        advice = "the baseline knows it by heart, so any artifact would pass; give one that it has not seen"
        raise _too_little(path, found, f"{LEAST_ENTROPY}", advice)


def _too_little(path: Path, found: str, least: str, advice: str) -> UserError:
    return UserError(f"the text {path} has {found}; quality needs at least {least}: {advice}")
