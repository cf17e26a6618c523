"""The domains of the held-out text that a baseline can predict: the others say nothing about an artifact.

A model that was trained on code alone guesses in prose. In a domain that the model cannot predict, its most
likely token is a matter of chance and changes with every rounding. Nobody serves such text with such a model
anyway.
"""

import math
from dataclasses import replace

from torch import nn

from ...serving_check.quality import nats
from ..checkpoints.checkpoint import Checkpoint
from .held_out import WINDOW, HeldOutText, read_held_out

PROBED = 4 * WINDOW
"""How many tokens of each domain the baseline reads."""
MOST_BITS = 2.0
"""Bits that the baseline may need for a byte of a domain. A general compressor needs as many for English
prose: `xz -9` 1.99 for the first 100 MB of Wikipedia (enwik8). The bundled checkpoint needs 1.6 for code, 2.5
for prose, 2.6 for chat and 4.6 for other languages."""


def read_known(
    model: nn.Module,
    artifact: Checkpoint,
    baseline: Checkpoint,
    tokens: int,
    window: int = WINDOW,
    prompt: int = 0,
) -> HeldOutText:
    """Read like `read_held_out` of Scalegate's own text, but with only the domains that `model` predicts.

    All domains are read if the model predicts none.
    """
    foreign = foreign_domains(model, read_held_out(None, artifact, baseline, PROBED))
    text = read_held_out(None, artifact, baseline, tokens, window, prompt, foreign)
    return replace(text, foreign=foreign)


def without_foreign(model: nn.Module, text: HeldOutText) -> HeldOutText:
    """Return the windows of the domains that `model` predicts, if all of the text has been read already."""
    foreign = foreign_domains(model, text)
    kept = [index for index, domain in enumerate(text.domains) if domain not in foreign]
    windows, domains = [text.windows[index] for index in kept], [text.domains[index] for index in kept]
    return replace(text, windows=windows, domains=domains, foreign=foreign)


def foreign_domains(model: nn.Module, text: HeldOutText) -> dict[str, float]:
    """Return the domains that `model` cannot predict, with the bits per byte that it needs; empty if these
    are all domains.
    """
    bits = bits_a_byte(model, text)
    foreign = {domain: value for domain, value in bits.items() if value > MOST_BITS}
    return {} if len(foreign) == len(bits) else foreign


def bits_a_byte(model: nn.Module, text: HeldOutText) -> dict[str, float]:
    """Return, for each domain, the bits that `model` needs on average for a byte of UTF-8."""
    needed: dict[str, float] = dict.fromkeys(text.domains, 0.0)
    size = dict.fromkeys(text.domains, 0)
    for domain, window in zip(text.domains, text.windows, strict=True):
        needed[domain] += nats(model, window)
        size[domain] += len(text.tokenizer.decode(window[1:].tolist()).encode())
    return {domain: needed[domain] / math.log(2) / max(1, size[domain]) for domain in needed}
