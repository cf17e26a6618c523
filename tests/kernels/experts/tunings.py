"""Tunings of the experts of one token: what is served, and what it was chosen from; not a test by itself."""

from scalegate.kernels.experts.one_token import TUNING, Tuning

CANDIDATES = (
    TUNING,
    Tuning(gate_up_splits=2, down_splits=1, prefetch=False),
    Tuning(gate_up_splits=4, down_splits=1, prefetch=True),
    Tuning(gate_up_splits=2, down_splits=2, prefetch=True),
)
