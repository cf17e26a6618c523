"""The model runner for the CPU: decoding and prefill in separate passes.

This runner is also the plain form of a step, for comparison with `cuda_runner.py`.
"""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...base.batch_invariance import CPU_ROWS, BatchInvariance
from .attention import AttentionLayer, follow_lengths
from .forward import Forward
from .kv_pool import KVPool
from .model_runner import StepResult
from .sampling.logit_adjustments import LogitAdjustments
from .sampling.sampler import SamplingBatch, sample
from .scheduler import PrefillChunk, Schedule
from .sequence import Sequence
from .step_clock import StepClock
from .step_input import StepBuffers, StepShape


class CpuRunner:
    """A `ModelRunner` that pads only on request, since padding adds work on a CPU."""

    def __init__(
        self,
        model: PreTrainedModel,
        layers: dict[int, AttentionLayer],
        pool: KVPool,
        buckets: tuple[int, ...] | None,
        largest_chunk: int,
        batch_invariance: BatchInvariance = "tuned",
    ):
        """buckets: batch sizes to which decode steps are padded, ascending; None for no padding

        batch_invariance: in modes other than `tuned`, every pass has CPU_ROWS tokens, and buckets are ignored
        """
        self.model = model
        self.clock = StepClock(model.device)
        self.buckets = buckets
        self._max_requests = len(pool.block_table)
        self._long_requests = follow_lengths(model, pool.block_table.shape, pool.page_size)
        self._forward = Forward(
            model, layers, pool.layers, as_op=False, states=pool.states, long_requests=self._long_requests
        )
        self._keeps_bits = batch_invariance != "tuned"
        if model.device.type == "cpu" and not self._keeps_bits:
            self._forward.run_without_modules()
        largest = max(largest_chunk + self._max_requests, CPU_ROWS)
        self._buffers = StepBuffers(
            pool.block_table,
            pool.page_size,
            largest,
            model.device,
            static=False,
            batch_invariance=batch_invariance,
        )
        self._adjustments = LogitAdjustments(model.device)
        self._sampling: tuple[list[Sequence], SamplingBatch] | None = None

    def batches(self, schedule: Schedule) -> list[Schedule]:
        """Run decoding and prefill separately, although `run` would take a mixed batch too."""
        if self._keeps_bits:
            return schedule.in_passes(CPU_ROWS)
        apart = Schedule(schedule.decode, []), Schedule([], schedule.prefill)
        return [batch for batch in apart if batch.num_tokens]

    def run(self, batch: Schedule) -> StepResult:
        """Run a batch. The tokens have been drawn when this returns."""
        sequences, shape = batch.sampled, self._shape(batch)
        if self._long_requests is not None:
            self._long_requests.take(batch.is_long_by_row)
        step = self._buffers.input(shape, self._buffers.stage(batch.decode, batch.prefill, shape))
        logits = self._forward(step.token_ids, step.attention, step.logits_indices)
        rows: slice | list[int] = slice(0, len(sequences))
        scored: list[tuple[PrefillChunk, Tensor]] = []
        if batch.is_scored:
            rows, slices = batch.rows_of_logits()
            scored = [(chunk, logits[at]) for chunk, at in zip(batch.prefill, slices, strict=True)]
        logits, positions = logits[rows], step.sample_positions[rows]
        if not sequences:
            return StepResult(sequences, logits, positions, scored)
        return StepResult(sequences, logits, self._draw(logits, sequences, positions), scored)

    def warm_up_tokens(self) -> list[int]:
        return []

    def warm_up(self, num_tokens: int) -> None:
        """Do nothing: there are no graphs to capture."""

    def warm_up_requests(self) -> list[int]:
        """Return the batch sizes to warm up: every bucket, or the powers of two if there are no buckets."""
        if self.buckets is not None:
            return list(self.buckets)
        return [1 << power for power in range(self._max_requests.bit_length())]

    def _draw(self, logits: Tensor, sequences: list[Sequence], positions: Tensor) -> Tensor:
        asking = [index for index, sequence in enumerate(sequences) if sequence.adjusts_logits]
        if not asking:
            return self._sample(logits, sequences, positions)
        who = [sequences[index] for index in asking]
        adjusted = logits.float() if logits.dtype != torch.float32 else logits.clone()
        adjusted[asking] = self._adjustments.apply(logits[asking], who)
        drawn = self._sample(adjusted, sequences, positions)
        self._adjustments.observe(who, drawn[asking])
        return drawn

    def _sample(self, logits: Tensor, sequences: list[Sequence], positions: Tensor) -> Tensor:
        batch = self._sampling_batch(sequences)
        if not (self._keeps_bits and batch.sampled):
            return sample(logits, batch, positions)
        # Row by row: how torch sums a row of probabilities depends on how many there are.
        device = self.model.device
        rows = [slice(index, index + 1) for index in range(len(sequences))]
        alone = [sample(logits[at], SamplingBatch.of(sequences[at], device), positions[at]) for at in rows]
        return torch.cat(alone)

    def _shape(self, batch: Schedule) -> StepShape:
        if self._keeps_bits:
            return self._buffers.shape(CPU_ROWS, len(batch.decode) + len(batch.prefill), CPU_ROWS)
        if batch.prefill:
            # A chunk in which no prompt ends still computes one row of logits: no product has zero rows.
            requests = len(batch.decode) + len(batch.prefill)
            logits = len(batch.sampled) + sum(len(chunk.scored) for chunk in batch.prefill)
            return self._buffers.shape(batch.num_tokens, requests, max(1, logits))
        count = len(batch.decode)
        buckets = (count,) if self.buckets is None else self.buckets
        return self._buffers.decode_shape(next(bucket for bucket in buckets if bucket >= count))

    def _sampling_batch(self, sequences: list[Sequence]) -> SamplingBatch:
        """Return the batch of the previous step if its sequences are the same, else a new one."""
        if self._sampling is None or self._sampling[0] != sequences:
            self._sampling = (sequences, SamplingBatch.of(sequences, self.model.device))
        return self._sampling[1]
