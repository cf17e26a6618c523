"""How well a model predicts a text: mean nats per token, for the benches that compare weights."""

from collections.abc import Sequence

from scalegate.serving_check.quality import continuation_nats
from torch import Tensor, nn


def predicted_tokens(windows: Sequence[Tensor]) -> int:
    """Every token of every window but its first."""
    return sum(len(window) - 1 for window in windows)


def nats_per_token(model: nn.Module, windows: Sequence[Tensor]) -> float:
    """Mean negative log-likelihood of the windows' predicted tokens under `model`."""
    nats = 0.0
    for window in windows:
        first, *rest = window.tolist()
        nats += len(rest) * continuation_nats(model, [first], rest)
    return nats / predicted_tokens(windows)
