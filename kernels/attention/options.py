"""The options of one layer's attention beyond softmax(q·k)·v; every kernel and every reference accepts them.

This class does not hold a kernel's compile-time parameters (its `Form`) or the places of keys and values.
"""

from dataclasses import dataclass, field

from torch import Tensor

LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class AttentionOptions:
    """The ways in which one layer's attention differs from plain softmax(q·k)·v; tensors are not compared."""

    scale: float
    sliding_window: int | None = None
    """How many keys a query sees, its own included; None if it sees all."""
    softcap: float | None = None
    """Bounds the scores: softcap * tanh(score / softcap)."""
    sinks: Tensor | None = field(default=None, compare=False, repr=False)
    """[H]: a logit that each head's softmax counts but gives no value."""
    key_scale: Tensor | None = field(default=None, compare=False, repr=False)
    """Scales of stored keys, fp32: one per head [H_kv] for e4m3; one per token and head (3 dimensions) for
    int8."""
    value_scale: Tensor | None = field(default=None, compare=False, repr=False)
    """Scales of stored values, in the same form."""

    @property
    def is_plain(self) -> bool:
        """Say whether every query sees all keys before it, and the softmax is of the keys' scores alone."""
        return self.sliding_window is None and self.softcap is None and self.sinks is None

    @property
    def window(self) -> int:
        """The window for kernels: 0 if a query sees all keys."""
        return self.sliding_window or 0

    @property
    def scale_log2(self) -> float:
        return self.scale * LOG2_E

    @property
    def softcap_log2(self) -> float:
        """The cap for kernels, in log2 like their scores; 0 if there is none."""
        return (self.softcap or 0.0) * LOG2_E

    @property
    def scales(self) -> int:
        """The scales' dimensions for kernels: 0 without scales, 1 for one per head, 2 for one per token and
        head.
        """
        if self.key_scale is None:
            return 0
        return 2 if self.key_scale.ndim == 3 else 1
