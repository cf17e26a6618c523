"""Schedules the next step: admission, chunked prefill, growth, preemption. No tensors here."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from ...base.batch_invariance import row_tiles
from .kv_pool import KVPool
from .sequence import Sequence

MOST_SCORED = 256
"""The most prompt tokens per step whose logits are computed: 256 rows of 152k take 80 MB in bf16."""


@dataclass(frozen=True)
class PrefillChunk:
    """Consecutive tokens of one sequence, computed in this step."""

    sequence: Sequence
    start: int
    count: int
    is_replay: bool = False
    """Whether this is a token that was decoded before a preemption and is now decoded again."""

    @property
    def completes(self) -> bool:
        """Say whether the chunk ends with the sequence's last token, so that the next one can be drawn."""
        return self.start + self.count == self.sequence.length

    @property
    def scored(self) -> range:
        """Return the positions whose logits give prompt logprobs; empty unless the request asks for them."""
        if not self.sequence.is_scored:
            return range(0)
        first = max(self.start, len(self.sequence.prompt_logprobs))
        return range(first, min(self.start + self.count, self.sequence.num_prompt - 1))


@dataclass(frozen=True)
class Schedule:
    """The work of one step: decoding requests, prefill chunks, or both (a mixed batch)."""

    decode: list[Sequence] = field(default_factory=list)
    prefill: list[PrefillChunk] = field(default_factory=list)
    """The prefill chunks of the step; replays come first."""

    @property
    def num_tokens(self) -> int:
        return len(self.decode) + sum(chunk.count for chunk in self.prefill)

    @property
    def sampled(self) -> list[Sequence]:
        """Return the sequences for which a token is drawn: decoding ones, then those whose prefill ends in
        this step.
        """
        return [*self.decode, *(chunk.sequence for chunk in self.prefill if chunk.completes)]

    @property
    def is_long_by_row(self) -> dict[int, bool]:
        """Return whether each request of the step is beyond the original context (LongRoPE), by its row."""
        sequences = [*self.decode, *(chunk.sequence for chunk in self.prefill)]
        return {sequence.row: sequence.is_long for sequence in sequences if sequence.row is not None}

    def in_passes(self, tokens: int) -> "list[Schedule]":
        """Yield the schedule's work in passes of at most `tokens`: decoding first, then prefill chunks, cut
        to fit.
        """
        passes = [Schedule(self.decode[at], []) for at in row_tiles(len(self.decode), tokens)]
        room = 0
        for chunk in self.prefill:
            start, end = chunk.start, chunk.start + chunk.count
            while start < end:
                if room == 0:
                    passes.append(Schedule())
                    room = tokens
                count = min(room, end - start)
                passes[-1].prefill.append(PrefillChunk(chunk.sequence, start, count))
                start, room = start + count, room - count
        return passes

    @property
    def is_scored(self) -> bool:
        """Say whether a request asks for prompt logprobs, which need further logits."""
        return any(chunk.sequence.is_scored for chunk in self.prefill)

    def rows_of_logits(self) -> tuple[list[int], list[slice]]:
        """Return rows of a step's logits [L, V]: one per sampled sequence, and a slice of scored rows per
        chunk.

        Decoding requests come first. Each chunk follows with its scored rows, then the row of its last token.
        """
        sampled, scored, row = list(range(len(self.decode))), [], len(self.decode)
        for chunk in self.prefill:
            scored.append(slice(row, row + len(chunk.scored)))
            row += len(chunk.scored)
            if chunk.completes:
                sampled.append(row)
                row += 1
        return sampled, scored


class Scheduler:
    """First come, first served. Every running request has a row, and pages for all its tokens.

    When the pool is full, the request admitted last is preempted: it loses its pages and waits, first in
    line, to be computed again. The request admitted first is never preempted, and the pool holds at least one
    full context, so all requests finish.

    With `pin` on a GPU, tokens that a preempted request had decoded are decoded again, one in a step. Prefill
    uses another kernel, which would give other bits.

    A request that grows beyond the original context of a model with LongRoPE is computed again: it keeps its
    row and pages.

    After a failed step, requests without a token are suspects: each is tried without other such requests.
    """

    def __init__(
        self,
        pool: KVPool,
        prefill_chunk: int,
        chunk_while_decoding: int,
        replays: bool = False,
        original_context: int | None = None,
    ):
        """replays: after a preemption, decode the decoded tokens once more instead of prefilling them.
        original_context: the length beyond which a request is long; None without LongRoPE
        """
        self.pool = pool
        self.original_context = original_context
        self.replays = replays
        self.prefill_chunk = prefill_chunk
        self.chunk_while_decoding = chunk_while_decoding
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        """The running sequences, in the order in which they were admitted."""
        self.preemptions = 0
        self.suspects = 0
        """How many waiting and running sequences are suspects."""

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def schedule(self) -> Schedule:
        for sequence in self.running:
            if self._outgrows(sequence) and not sequence.is_long:
                sequence.is_long, sequence.num_computed = True, 0
        self._grow_or_preempt()
        decode: list[Sequence] = []
        prefilling: list[Sequence] = []
        for sequence in self.running:
            (prefilling if sequence.is_prefilling else decode).append(sequence)
        budget = self.chunk_while_decoding if decode else self.prefill_chunk
        return Schedule(decode, self._prefill_chunks(prefilling, budget))

    def remove(self, sequence: Sequence) -> None:
        """Remove a finished or aborted sequence; its row and pages are free at once."""
        (self.running if sequence.row is not None else self.waiting).remove(sequence)
        self.pool.release(sequence)
        self.suspects -= sequence.is_suspect

    def restart(self, sequences: Iterable[Sequence]) -> None:
        """Start again after a failed step: only the given sequences wait, in their order, and none runs."""
        for sequence in self.running:
            self.pool.release(sequence)
        self.running = []
        self.waiting = deque(sequences)
        self.suspects = sum(sequence.is_suspect for sequence in self.waiting)

    def _outgrows(self, sequence: Sequence) -> bool:
        return self.original_context is not None and sequence.length > self.original_context

    def _grow_or_preempt(self) -> None:
        """Give each decoding sequence a page for its last token, preempting later ones if necessary."""
        index = 0
        while index < len(self.running):
            while not self.pool.grow(self.running[index]):
                if self._preempt_last() == index:
                    return
            index += 1

    def _preempt_last(self) -> int:
        """Preempt the sequence admitted last; return its index among the running ones."""
        victim = self.running.pop()
        self.pool.release(victim)
        self.waiting.appendleft(victim)
        self.preemptions += 1
        return len(self.running)

    def _prefill_chunks(self, prefilling: list[Sequence], budget: int) -> list[PrefillChunk]:
        """Return replays, then up to `budget` prompt tokens: of running sequences, then of newly admitted
        ones.
        """
        replaying = [sequence for sequence in prefilling if self._is_replaying(sequence)]
        chunks = [PrefillChunk(sequence, sequence.num_computed, 1, is_replay=True) for sequence in replaying]
        scored = MOST_SCORED
        for sequence in prefilling:
            if budget == 0:
                return chunks
            if not self._is_replaying(sequence) and (scored or not sequence.is_scored):
                chunks.append(self._chunk(sequence, budget, scored))
                budget -= chunks[-1].count
                scored -= len(chunks[-1].scored)
        while budget > 0 and self.waiting and self._can_admit(self.waiting[0]):
            if self.waiting[0].is_scored and not scored:
                break
            sequence = self.waiting.popleft()
            sequence.is_long = self._outgrows(sequence)
            self.pool.admit(sequence)
            self.running.append(sequence)
            chunks.append(self._chunk(sequence, budget, scored))
            budget -= chunks[-1].count
            scored -= len(chunks[-1].scored)
        return chunks

    def _is_replaying(self, sequence: Sequence) -> bool:
        return self.replays and sequence.num_prompt <= sequence.num_computed < sequence.length - 1

    def _chunk(self, sequence: Sequence, budget: int, scored: int) -> PrefillChunk:
        """Return a chunk of at most `budget` tokens, and at most `scored` if the request asks for prompt
        logprobs.
        """
        start = sequence.num_computed
        most = min(budget, scored) if sequence.is_scored else budget
        end = sequence.num_prompt if self.replays else sequence.length
        return PrefillChunk(sequence, start, min(most, end - start))

    def _can_admit(self, sequence: Sequence) -> bool:
        """Say whether all of a sequence's tokens have room, and each running sequence that may grow has
        another page.
        """
        if self.suspects and self._must_wait_for_another(sequence):
            return False
        growing = sum(len(other.pages) < self.pool.pages_for(other.max_len) for other in self.running)
        needed = self.pool.pages_for(sequence.length) + growing
        return self.pool.free_rows > 0 and (needed <= self.pool.free_pages or not self.running)

    def _must_wait_for_another(self, sequence: Sequence) -> bool:
        """Say whether a sequence and a running one both have no token yet, and at least one of them is a
        suspect.
        """
        unproven = [each for each in self.running if not each.is_proven]
        return not sequence.is_proven and any(other.is_suspect or sequence.is_suspect for other in unproven)
