"""Logit adjustments before tokens are drawn: penalties, bias, min_tokens, grammars.

The adjustments are not part of a CUDA graph. Adjustments run outside the graph, only on rows of requests that
ask for them, so that other requests pay nothing. Token counts stay on the device: with overlapped steps, the
host does not know the last token.
"""

from collections.abc import Sequence as Rows

import torch
from torch import Tensor

from ..device_copies import to_device
from ..grammar import masked
from ..sequence import Sequence


class LogitAdjustments:
    """Token counts of requests with penalties, by their rows in the pool.

    Call `apply` before a token is drawn, and `observe` after that. If a row's counts do not belong to its
    sequence, because the row belonged to another sequence or a step has failed, the counts are made again
    from the host's tokens.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._in_prompt = torch.zeros(0, 0, dtype=torch.bool, device=device)
        """[rows, V]: whether each token occurs in the prompt. Grows to the highest row that was used."""
        self._in_output = torch.zeros(0, 0, dtype=torch.int32, device=device)
        """[rows, V]: how often each token occurs in the output."""
        self._counted: dict[int, tuple[Sequence, int]] = {}
        """For each row, the sequence that was counted and how many of its output tokens were counted."""

    def apply(self, logits: Tensor, sequences: Rows[Sequence]) -> Tensor:
        """Adjust logits [A, V], one row for each sequence, in a copy: float32 [A, V].

        The adjustments have the order of transformers' processors: bias, repetition, presence and frequency,
        min_tokens; then grammars.
        """
        scores = logits.to(torch.float32, copy=True)
        self._add_bias(scores, sequences)
        penalized = [index for index, sequence in enumerate(sequences) if sequence.params.has_penalties]
        if penalized:
            who = [sequences[index] for index in penalized]
            at = self._tensor(penalized, torch.int64)
            scores[at] = self._penalize(scores[at], who)
        ends = [
            (index, token)
            for index, sequence in enumerate(sequences)
            if sequence.num_output < sequence.params.min_tokens
            for token in sequence.ends
            if token < logits.shape[1]
        ]
        if ends:
            rows, tokens = self._tensor(ends, torch.int64).T
            scores[rows, tokens] = -torch.inf
        matchers = {index: s.matcher for index, s in enumerate(sequences) if s.matcher is not None}
        if matchers:
            at = self._tensor(list(matchers), torch.int64)
            scores[at] = masked(scores[at], list(matchers.values()))
        return scores

    def observe(self, sequences: Rows[Sequence], drawn: Tensor) -> None:
        """Count the tokens just drawn, int64 [A]. `observe` is called before the sequences get the tokens."""
        penalized = [index for index, sequence in enumerate(sequences) if sequence.params.has_penalties]
        if not penalized:
            return
        rows = []
        for index in penalized:
            sequence = sequences[index]
            assert sequence.row is not None
            # The number comes first: if counting fails, it does not match, and all tokens are counted again.
            self._counted[sequence.row] = sequence, sequence.num_output + 1
            rows.append(sequence.row)
        self._in_output[self._tensor(rows, torch.int64), drawn[self._tensor(penalized, torch.int64)]] += 1

    def _add_bias(self, scores: Tensor, sequences: Rows[Sequence]) -> None:
        biased = [
            (index, token, bias)
            for index, sequence in enumerate(sequences)
            for token, bias in sequence.params.logit_bias
        ]
        if biased:
            rows, tokens, biases = zip(*biased, strict=True)
            where = self._tensor(rows, torch.int64), self._tensor(tokens, torch.int64)
            scores.index_put_(where, self._tensor(biases, torch.float32), accumulate=True)

    def _penalize(self, scores: Tensor, sequences: Rows[Sequence]) -> Tensor:
        for sequence in sequences:
            self._count(sequence, scores.shape[1])
        rows = self._tensor([sequence.row for sequence in sequences], torch.int64)
        asked = [sequence.params for sequence in sequences]
        presence, frequency, repetition = self._tensor(
            [(p.presence_penalty, p.frequency_penalty, p.repetition_penalty) for p in asked], torch.float32
        ).T.unsqueeze(-1)
        counts = self._in_output[rows]
        seen = self._in_prompt[rows] | (counts > 0)
        repeated = torch.where(scores > 0, scores / repetition, scores * repetition)
        return torch.where(seen, repeated, scores) - frequency * counts - presence * (counts > 0)

    def _count(self, sequence: Sequence, vocab_size: int) -> None:
        """Count all of a sequence's tokens, unless they were counted when they were drawn."""
        row = sequence.row
        assert row is not None
        if self._counted.get(row) == (sequence, sequence.num_output):
            return
        if row >= len(self._in_output):
            self._grow(row, vocab_size)
        prompt, output = sequence.tokens[: sequence.num_prompt], sequence.tokens[sequence.num_prompt :]
        self._in_prompt[row] = False
        self._in_prompt[row, self._tensor(prompt, torch.int64)] = True
        self._in_output[row] = 0
        tokens = self._tensor(output, torch.int64)
        self._in_output[row].scatter_add_(0, tokens, torch.ones_like(tokens, dtype=torch.int32))
        self._counted[row] = sequence, sequence.num_output

    def _grow(self, row: int, vocab_size: int) -> None:
        """Grow to twice the rows, or to `row`. Low rows are used first, so there are seldom many."""
        rows = max(row + 1, 2 * len(self._in_output))
        for name in ("_in_prompt", "_in_output"):
            old: Tensor = getattr(self, name)
            new = torch.zeros(rows, vocab_size, dtype=old.dtype, device=self._device)
            new[: len(old)] = old.reshape(len(old), vocab_size)
            setattr(self, name, new)

    def _tensor(self, values: object, dtype: torch.dtype) -> Tensor:
        return to_device(torch.tensor(values, dtype=dtype), self._device)
