"""Whether a calibration text is one that the model knows: measured before anything is solved on it.

A text is typical of a model where it takes about as many nats as what the model writes itself (Nalisnick et
al. 2019, arXiv 1906.02994). On random bytes, or in a language that it has not seen, it takes many more.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from ...checkpoints.checkpoint import Checkpoint
from ...model_loader.layer_stream import LayerStream

SEQUENCES_READ = 16
"""Of each kind, from all over the text."""
LEAST_STRANGE = 1.5
"""Times the model's own nats: a text above it does not fit. Trained on Python, 5M is at 1.0 on its held-out
text, 1.1 on C, 1.9 on prose and 3.0 on random bytes."""
OWN_OF_GUESSING = 1 / 3
"""Of the nats of a token drawn evenly, what a model that writes nothing here counts as: few write more."""


@dataclass(frozen=True)
class TextFit:
    """Mean nats per token: on the text, on what the model writes (None where it writes nothing), guessing."""

    text: float
    own: float | None
    guessing: float

    @property
    def fits(self) -> bool:
        own = self.guessing * OWN_OF_GUESSING if self.own is None else self.own
        return self.text <= LEAST_STRANGE * own

    @property
    def said(self) -> str | None:
        """What to tell a person; None where the text fits."""
        if self.fits:
            return None
        own = "" if self.own is None else f"what the model writes itself takes {self.own:.2f}, "
        return (
            f"the calibration text does not fit the model: {self.text:.2f} nats a token, where {own}"
            f"guessing takes {self.guessing:.2f}; give one of the kind that it is used on, or "
            "--calibration self"
        )

    def to_json(self) -> dict[str, Any]:
        return {"nats_per_token": asdict(self), "fits": self.fits}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "TextFit":
        """Undoes `to_json`."""
        return cls(**value["nats_per_token"])


def measure_fit(
    checkpoint: Checkpoint, text: Tensor, own: Tensor | None, vocabulary: int, device: torch.device
) -> TextFit:
    """From a few sequences of both, int64 [S, T]."""
    few = text[torch.linspace(0, len(text) - 1, min(len(text), SEQUENCES_READ)).long()]
    on_own = None if own is None else _nats_on(checkpoint, own[:SEQUENCES_READ], device)
    return TextFit(_nats_on(checkpoint, few, device), on_own, math.log(vocabulary))


def _nats_on(checkpoint: Checkpoint, sequences: Tensor, device: torch.device) -> float:
    """Mean nats per token, one decoder layer in memory at a time."""
    with torch.no_grad():
        stream = LayerStream(checkpoint, sequences, device)
        for name in stream.layers:
            stream.place(name)
            stream.advance(name)
            stream.drop(name)
        # A sequence's logits at a time: a vocabulary is large.
        hidden = (one[None] for states in stream.outputs() for one in states)
        losses = [
            cross_entropy(stream.predictions(one)[0, :-1].float(), sequence[1:].to(device))
            for one, sequence in zip(hidden, sequences, strict=True)
        ]
    return float(torch.stack(losses).mean())
