"""Compares sampled tokens with the distributions that they should be drawn from: figures of a goodness of
fit.

`checks/in_use/sampling.py` decides whether tokens and distributions fit.
"""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from .evidence.in_use import PIT_BINS, Draws

HOTTER = 2
"""How many times as high a temperature is that of `hotter_nats`."""
ROWS = 64
"""How many rows of logits [rows, vocab] are converted to fp64 at once: 64 rows of 152k take 78 MB, and there
are six such tensors."""


def draws_of(logits: Tensor, tokens: Sequence[int], temperature: float, name: str) -> Draws:
    """Compare `tokens` with the distributions softmax(logits / temperature), logits [tokens, V] of any dtype.

    The probability integral transform of a token is the probability of all tokens before it, the most likely
    first, plus a random share of its own: uniform from 0 to 1 if it was drawn from the distribution
    (Czado, Gneiting and Held, 2009).

    name: the answer's name, from which the random shares are made, so that they can be repeated
    """
    shares = _random_shares(name, len(tokens)).to(logits.device)
    drawn = torch.tensor(tokens, device=logits.device)
    parts = zip(logits.split(ROWS), drawn.split(ROWS), shares.split(ROWS), strict=True)
    figures = [_figures(rows, token, share, temperature) for rows, token, share in parts]
    nats, entropy, variance, transform, hotter = torch.cat(figures).cpu().T
    # A transform that is no number counts as that of the least likely token.
    bins = (transform.nan_to_num(1.0) * PIT_BINS).long().clamp(max=PIT_BINS - 1)
    return Draws(
        tokens=len(tokens),
        nats=nats.sum().item(),
        surprisal=(nats - entropy).sum().item(),
        variance=variance.sum().item(),
        bins=tuple(bins.bincount(minlength=PIT_BINS).tolist()),
        hotter_nats=hotter.sum().item(),
    )


def _figures(logits: Tensor, tokens: Tensor, shares: Tensor, temperature: float) -> Tensor:
    """Return, in fp64 [rows, 5], each token's -log p, entropy, variance of -log p, probability integral
    transform and -log p at a higher temperature.
    """
    nats = -(logits.double() / temperature).log_softmax(-1)
    p = (-nats).exp()
    own = nats.gather(-1, tokens[:, None])
    # A token that cannot be drawn has infinite nats, which count for nothing.
    finite = nats.masked_fill(p == 0, 0.0)
    entropy = (p * finite).sum(-1, keepdim=True)
    variance = (p * (finite - entropy).square()).sum(-1)
    # Of tokens that are equally likely, the one with the lower id comes first.
    is_earlier = torch.arange(logits.shape[-1], device=logits.device) < tokens[:, None]
    before = (p * ((nats < own) | ((nats == own) & is_earlier))).sum(-1)
    transform = before + shares * (-own[:, 0]).exp()
    hotter = -(logits.double() / (HOTTER * temperature)).log_softmax(-1).gather(-1, tokens[:, None])
    return torch.stack([own[:, 0], entropy[:, 0], variance, transform, hotter[:, 0]], dim=1)


def _random_shares(name: str, count: int) -> Tensor:
    """Return uniform numbers from 0 to 1, fp64 [count]. The numbers come from a hash: a server's own draws
    may use the numbers that follow a seed.
    """
    digest = hashlib.sha256(name.encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    return torch.rand(count, generator=generator, dtype=torch.float64)
