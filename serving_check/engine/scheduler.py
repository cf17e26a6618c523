"""Who computes what in the next step: admission, chunked prefill, growth, preemption. No tensors here."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from ...base.batch_invariance import row_tiles
from .kv_pool import KVPool
from .sequence import Sequence

MOST_SCORED = 256
"""Prompt tokens in a step whose logits are computed: 256 rows of 152k take 80 MB in bf16."""


@dataclass(frozen=True)
class PrefillChunk:
    """Consecutive tokens of one sequence, computed in this step."""

    sequence: Sequence
    start: int
    count: int
    is_replay: bool = False
    """One token that it had decoded before it was preempted, and that is decoded again."""

    @property
    def completes(self) -> bool:
        """Whether the sequence's last token is among them, so that the next one can be drawn."""
        return self.start + self.count == self.sequence.length

    @property
    def scored(self) -> range:
        """Positions whose logits tell how likely the prompt's next token is, where that is wanted."""
        if not self.sequence.is_scored:
            return range(0)
        first = max(self.start, len(self.sequence.prompt_logprobs))
        return range(first, min(self.start + self.count, self.sequence.num_prompt - 1))


@dataclass(frozen=True)
class Schedule:
    """One step: a mixed batch, or one of decoding requests or prefill chunks alone."""

    decode: list[Sequence] = field(default_factory=list)
    prefill: list[PrefillChunk] = field(default_factory=list)
    """Replays first."""

    @property
    def num_tokens(self) -> int:
        return len(self.decode) + sum(chunk.count for chunk in self.prefill)

    @property
    def sampled(self) -> list[Sequence]:
        """Those that a token is drawn for: decoding ones, then prompts that end in this step."""
        return [*self.decode, *(chunk.sequence for chunk in self.prefill if chunk.completes)]

    def in_passes(self, tokens: int) -> "list[Schedule]":
        """The same in passes of at most `tokens`: decoding requests, then prompts, cut where one is full."""
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
        """Whether logits of prompts are wanted, besides those that tokens are drawn from."""
        return any(chunk.sequence.is_scored for chunk in self.prefill)

    def rows_of_logits(self) -> tuple[list[int], list[slice]]:
        """Where a step's logits are, [L, V]: the row of each sampled sequence, the scored rows of each chunk.

        Decoding requests have the first rows; then come, chunk by chunk, the scored ones and the last one.
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
    """First come, first served. Every running request has a row and pages for all its tokens.

    When the pool is full, the request admitted last gives its pages back and waits, first in line, to be
    computed again; the one admitted first always goes on, and the pool holds one full context: all finish.

    Where bits are pinned on a GPU, what a preempted request had decoded is decoded again, a token in a step:
    as part of its prompt another kernel would compute it, to other bits.

    After a step that failed, those without a token yet are suspects: each is tried with no other newcomer.
    """

    def __init__(self, pool: KVPool, prefill_chunk: int, chunk_while_decoding: int, replays: bool = False):
        """replays: decode again what was decoded before a preemption."""
        self.pool = pool
        self.replays = replays
        self.prefill_chunk = prefill_chunk
        self.chunk_while_decoding = chunk_while_decoding
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        """In the order they were admitted."""
        self.preemptions = 0
        self.suspects = 0
        """How many of those that wait or run are suspects."""

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def schedule(self) -> Schedule:
        self._grow_or_preempt()
        decode: list[Sequence] = []
        prefilling: list[Sequence] = []
        for sequence in self.running:
            (prefilling if sequence.is_prefilling else decode).append(sequence)
        budget = self.chunk_while_decoding if decode else self.prefill_chunk
        return Schedule(decode, self._prefill_chunks(prefilling, budget))

    def remove(self, sequence: Sequence) -> None:
        """Finished or aborted: its row and pages are free at once."""
        (self.running if sequence.row is not None else self.waiting).remove(sequence)
        self.pool.release(sequence)
        self.suspects -= sequence.is_suspect

    def restart(self, sequences: Iterable[Sequence]) -> None:
        """Begin again after a step that failed: these wait, in their order, and nothing else does or runs."""
        for sequence in self.running:
            self.pool.release(sequence)
        self.running = []
        self.waiting = deque(sequences)
        self.suspects = sum(sequence.is_suspect for sequence in self.waiting)

    def _grow_or_preempt(self) -> None:
        """Give each decoding sequence room for its last token, taking from those admitted after it."""
        index = 0
        while index < len(self.running):
            while not self.pool.grow(self.running[index]):
                if self._preempt_last() == index:
                    return
            index += 1

    def _preempt_last(self) -> int:
        """Send the sequence admitted last back to wait; the place it had in the order."""
        victim = self.running.pop()
        self.pool.release(victim)
        self.waiting.appendleft(victim)
        self.preemptions += 1
        return len(self.running)

    def _prefill_chunks(self, prefilling: list[Sequence], budget: int) -> list[PrefillChunk]:
        """Tokens to decode again; then up to `budget` prompt tokens: of those running first, then of those
        that can be admitted."""
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
            self.pool.admit(sequence)
            self.running.append(sequence)
            chunks.append(self._chunk(sequence, budget, scored))
            budget -= chunks[-1].count
            scored -= len(chunks[-1].scored)
        return chunks

    def _is_replaying(self, sequence: Sequence) -> bool:
        return self.replays and sequence.num_prompt <= sequence.num_computed < sequence.length - 1

    def _chunk(self, sequence: Sequence, budget: int, scored: int) -> PrefillChunk:
        """At most `budget` tokens; at most `scored` where their logits are wanted."""
        start = sequence.num_computed
        most = min(budget, scored) if sequence.is_scored else budget
        end = sequence.num_prompt if self.replays else sequence.length
        return PrefillChunk(sequence, start, min(most, end - start))

    def _can_admit(self, sequence: Sequence) -> bool:
        """Room for all its tokens, and a page for each running one that may grow, lest it preempt at once."""
        if self.suspects and self._must_wait_for_another(sequence):
            return False
        growing = sum(len(other.pages) < self.pool.pages_for(other.max_len) for other in self.running)
        needed = self.pool.pages_for(sequence.length) + growing
        return self.pool.free_rows > 0 and (needed <= self.pool.free_pages or not self.running)

    def _must_wait_for_another(self, sequence: Sequence) -> bool:
        """Whether it and a running one, one of them a suspect, are both without a token yet."""
        unproven = [each for each in self.running if not each.is_proven]
        return not sequence.is_proven and any(other.is_suspect or sequence.is_suspect for other in unproven)
