"""Whether a calibration text suits the model: measured before any weight is rounded on it.

A text is typical of a model if its loss per token is about that of the model's own text (Nalisnick et al.
2019, arXiv 1906.02994). Random bytes, or a language that the model has not seen, have a much higher loss.
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
"""How many sequences of each kind are read, spread over the whole text."""
LEAST_STRANGE = 1.5
"""A text does not fit above this many times the model's own nats. The 5M checkpoint, trained on Python, is at
1.0 on its held-out text, 1.1 on C, 1.9 on prose and 3.0 on random bytes."""
OWN_OF_GUESSING = 1 / 3
"""Share of the nats of guessing that stands for a model's own if it writes nothing; few models exceed it."""


@dataclass(frozen=True)
class TextFit:
    """Mean nats per token: on the text, on the model's own text (None if it generates none), and by
    guessing.
    """

    text: float
    own: float | None
    guessing: float

    @property
    def fits(self) -> bool:
        own = self.guessing * OWN_OF_GUESSING if self.own is None else self.own
        return self.text <= LEAST_STRANGE * own

    @property
    def notice(self) -> str | None:
        """Return a warning for the user; None if the text fits."""
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
        """Inverse of `to_json`."""
        return cls(**value["nats_per_token"])


def measure_fit(
    checkpoint: Checkpoint, text: Tensor, own: Tensor | None, vocabulary: int, device: torch.device
) -> TextFit:
    """Return how well a text fits the model, measured on a few sequences of the text and of the model, int64
    [S, T]."""
    few = text[torch.linspace(0, len(text) - 1, min(len(text), SEQUENCES_READ)).long()]
    on_own = None if own is None else _nats_on(checkpoint, own[:SEQUENCES_READ], device)
    return TextFit(_nats_on(checkpoint, few, device), on_own, math.log(vocabulary))


def _nats_on(checkpoint: Checkpoint, sequences: Tensor, device: torch.device) -> float:
    """Return the mean nats per token, with one decoder layer in memory at a time."""
    with torch.no_grad():
        stream = LayerStream(checkpoint, sequences, device)
        for name in stream.layers:
            stream.place(name)
            stream.advance(name)
            stream.drop(name)
        # A sequence's logits at a time: a vocabulary is large.
        outputs = (output[None] for batch in stream.outputs() for output in batch)
        losses = [
            cross_entropy(stream.predictions(output)[0, :-1].float(), sequence[1:].to(device))
            for output, sequence in zip(outputs, sequences, strict=True)
        ]
    return float(torch.stack(losses).mean())
