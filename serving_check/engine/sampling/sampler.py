"""Draws one token for each row of logits by the row's own parameters. On a GPU a kernel does this instead.

A row's token depends on its logits, parameters, seed and position, and on nothing else in the batch.
"""

import math
from collections.abc import Sequence as Rows
from dataclasses import dataclass

import torch
from torch import Tensor

from ..device_copies import to_device
from ..request import TokenLogprobs
from ..sequence import Sequence

FULL_MANTISSA = 1 << 24
LIKELY = 128
"""How many of a row's most likely tokens are sorted first for top_p: of 8,192 tokens this takes a twentieth
of the bisection's time."""
BISECTIONS = 30
ARGMAX_BLOCK = 128
AS_INTEGERS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
SCORED_AT_ONCE = 64
"""Rows of logits that are converted to float32 at once."""


@dataclass(frozen=True)
class SamplingBatch:
    """The sampling parameters of a batch's rows as tensors; reused while the rows stay the same."""

    sampled: list[int]
    """The indices of rows whose tokens are drawn; other rows take the most likely token."""
    temperature: Tensor
    """The temperature of each sampled row, float32 [S, 1]."""
    seed: Tensor
    """The seed of each sampled row, int64 [S]."""
    filtered: list[int]
    """The indices of rows with top_k, top_p or min_p among the sampled rows."""
    top_k: Tensor
    """int64 [len(filtered), 1]; 0 allows all tokens."""
    top_p: Tensor
    """float32 [len(filtered), 1]."""
    log_min_p: Tensor
    """float32 [len(filtered), 1]; -inf if the row has no min_p."""
    max_top_k: int
    any_top_p: bool

    @classmethod
    def of(cls, sequences: Rows[Sequence], device: torch.device) -> "SamplingBatch":
        sampled = [row for row, sequence in enumerate(sequences) if sequence.params.temperature > 0]
        params = [sequences[row].params for row in sampled]
        filtered = [at for at, p in enumerate(params) if p.top_k > 0 or p.top_p < 1 or p.min_p > 0]
        chosen = [params[at] for at in filtered]

        def column(values: list[float], dtype: torch.dtype) -> Tensor:
            return to_device(torch.tensor(values, dtype=dtype), device)

        return cls(
            sampled=sampled,
            temperature=column([p.temperature for p in params], torch.float32)[:, None],
            seed=column([sequences[row].seed for row in sampled], torch.int64),
            filtered=filtered,
            top_k=column([p.top_k for p in chosen], torch.int64)[:, None],
            top_p=column([p.top_p for p in chosen], torch.float32)[:, None],
            log_min_p=column(
                [math.log(p.min_p) if p.min_p > 0 else -math.inf for p in chosen], torch.float32
            )[:, None],
            max_top_k=max((p.top_k for p in chosen), default=0),
            any_top_p=any(p.top_p < 1 for p in chosen),
        )


def sample(logits: Tensor, batch: SamplingBatch, positions: Tensor) -> Tensor:
    """Draw tokens int64 [B] from logits [B, V] for positions int64 [B] of the tokens to be drawn."""
    tokens = first_argmax(logits)
    if not batch.sampled:
        return tokens
    scores = logits[batch.sampled].float() / batch.temperature
    if batch.filtered:
        scores[batch.filtered] = filter_scores(scores[batch.filtered], batch)
    # One uniform number a row, looked up in the cumulative distribution: the first token whose sum is above.
    cumulative = scores.softmax(dim=-1).cumsum(dim=-1)
    draw = uniform(batch.seed, positions[batch.sampled])[:, None] * cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, draw, right=True)[:, 0].clamp_(max=logits.shape[1] - 1)
    tokens[batch.sampled] = drawn
    return tokens


def first_argmax(logits: Tensor) -> Tensor:
    """Return the first maximum of each row, int64 [B]."""
    if logits.device.type == "cpu" and logits.dtype in AS_INTEGERS:
        # Bits of positive numbers are ordered as the numbers are, and above those of negative numbers and of
        # zeros. For one row of 8,192 numpy takes 2 µs so, and torch 21.
        bits = logits.view(AS_INTEGERS[logits.dtype]).numpy()
        found = bits.argmax(axis=-1)
        if all(bits.item(row, at) > 0 for row, at in enumerate(found.tolist())):
            return torch.from_numpy(found)
    return _argmax_by_blocks(logits)


def _argmax_by_blocks(logits: Tensor) -> Tensor:
    """Two passes find the maximum, since torch on a CPU vectorizes amax but not argmax."""
    if logits.shape[1] % ARGMAX_BLOCK:
        return logits.max(dim=-1).indices
    blocks = logits.unflatten(1, (-1, ARGMAX_BLOCK))
    block = blocks.amax(dim=-1).max(dim=-1).indices
    within = blocks[torch.arange(len(logits), device=logits.device), block].max(dim=-1).indices
    return block * ARGMAX_BLOCK + within


def filter_scores(scores: Tensor, batch: SamplingBatch) -> Tensor:
    """Return scores [rows, V] with -inf for tokens excluded by top_k, min_p, then top_p; ties stay
    together.
    """
    lowest = scores.amax(dim=-1, keepdim=True) + batch.log_min_p
    if batch.max_top_k > 0:
        best = scores.topk(min(batch.max_top_k, scores.shape[1]), dim=-1).values
        last_kept = best.gather(1, (batch.top_k - 1).clamp(0, best.shape[1] - 1))
        lowest = torch.where(batch.top_k > 0, torch.maximum(lowest, last_kept), lowest)
    scores = scores.masked_fill(scores < lowest, -math.inf)
    if batch.any_top_p:
        probabilities = scores.softmax(dim=-1)
        least = _least_of_top_p(probabilities, batch.top_p)
        scores = scores.masked_fill((probabilities < least) & (batch.top_p < 1), -math.inf)
    return scores


def _least_of_top_p(probabilities: Tensor, top_p: Tensor) -> Tensor:
    """Return the greatest bound [rows, 1] such that tokens at or above it have top_p of the probability.

    A row whose most likely tokens have so much needs no pass over all tokens. Which way a row takes depends
    on that row alone.
    """
    likely = probabilities.topk(min(LIKELY, probabilities.shape[1]), dim=-1).values
    enough = likely.cumsum(dim=-1) >= top_p
    least = likely.gather(1, enough.int().argmax(dim=-1, keepdim=True))
    flat = (~enough[:, -1] & (top_p[:, 0] < 1)).nonzero()[:, 0]
    if len(flat):
        least[flat] = _bisect_top_p(probabilities[flat], top_p[flat])
    return least


def _bisect_top_p(probabilities: Tensor, top_p: Tensor) -> Tensor:
    """Return the same by bisection: on a CPU, 30 passes over a row take a quarter of the time of sorting the
    row.
    """
    low, high = torch.zeros_like(top_p), probabilities.amax(dim=-1, keepdim=True)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        enough = (probabilities * (probabilities >= middle)).sum(dim=-1, keepdim=True) >= top_p
        low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
    return low


def uniform(seed: Tensor, position: Tensor) -> Tensor:
    """Return float32 [B] in [0, 1): a hash (splitmix64) of seed and position, int64 [B]. There is no
    state.
    """
    state = seed + (position + 1) * -0x61C8864680B583EB
    state = (state ^ _shift(state, 30)) * -0x40A7B892E31B1A47
    state = (state ^ _shift(state, 27)) * -0x6B2FB644ECCEEE15
    state = state ^ _shift(state, 31)
    return _shift(state, 40).float() / FULL_MANTISSA


def _shift(value: Tensor, bits: int) -> Tensor:
    """Shift `value` right by `bits`, filling with zeros: torch's own shift keeps the sign."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _log_softmax(logits: Tensor, one_by_one: bool) -> Tensor:
    """Sum to float32 [B, V]. one_by_one: each row by itself, since the order of sums may depend on B."""
    if not one_by_one:
        return logits.float().log_softmax(dim=-1)
    return torch.cat([row.float().log_softmax(dim=-1) for row in logits.split(1)])


def token_logprobs(
    logits: Tensor, tokens: Tensor, sequences: Rows[Sequence], one_by_one: bool = False
) -> dict[int, TokenLogprobs]:
    """Return logprobs by row, for requests that ask for them, from the model's logits before any
    adjustment.
    """
    wanted = {row: s.params.logprobs for row, s in enumerate(sequences) if s.params.logprobs is not None}
    if not wanted:
        return {}
    rows = list(wanted)
    logprobs = _log_softmax(logits[rows], one_by_one)
    drawn = logprobs.gather(1, tokens[rows][:, None])[:, 0].tolist()
    best = logprobs.topk(max(wanted.values()), dim=-1)
    values, indices = best.values.tolist(), best.indices.tolist()
    return {
        row: TokenLogprobs(drawn[i], tuple(zip(indices[i][:count], values[i][:count], strict=True)))
        for i, (row, count) in enumerate(wanted.items())
    }


def prompt_logprobs(
    logits: Tensor, tokens: Rows[int], count: int, one_by_one: bool = False
) -> list[TokenLogprobs]:
    """Map logits [S, V] and the S tokens that followed to each token's log-probability, its rank, and the
    `count` best.
    """
    found: list[TokenLogprobs] = []
    for start in range(0, len(tokens), SCORED_AT_ONCE):
        part = slice(start, start + SCORED_AT_ONCE)
        logprobs = _log_softmax(logits[part], one_by_one)
        followed = to_device(torch.tensor(tokens[part]), logits.device)[:, None]
        given = logprobs.gather(1, followed)
        ranks = (logprobs > given).sum(dim=-1).add(1).tolist()
        best = logprobs.topk(count, dim=-1)
        rows = zip(given[:, 0].tolist(), best.indices.tolist(), best.values.tolist(), ranks, strict=True)
        found += [
            TokenLogprobs(logprob, tuple(zip(indices, values, strict=True)), rank)
            for logprob, indices, values, rank in rows
        ]
    return found
