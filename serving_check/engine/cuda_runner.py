"""The model runner for GPUs: mixed batches in one pass, as CUDA graphs; tokens are drawn on the device.

A step costs one copy to the device and one launch. The next step can read drawn tokens on the device, before
the host has them. In a mixed batch each weight is read once for all tokens, so decoding costs almost nothing
beside prefill. Batches are padded to the bucket of a captured graph, except large ones, whose kernels take
longer than their launches.
"""

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...base.batch_invariance import BatchInvariance
from .attention import AttentionLayer, follow_lengths
from .buckets import mixed_buckets, mixed_warm_up_buckets
from .compiling import triton_settings
from .compiling.cuda_graphs import CudaGraphs
from .device_copies import to_device
from .forward import Forward
from .jit_monitor import JitEvent, report
from .kv_pool import KVPool
from .model_runner import StepResult
from .sampling.logit_adjustments import LogitAdjustments
from .sampling.sampling_rows import SamplingRows
from .scheduler import MOST_SCORED, PrefillChunk, Schedule
from .sequence import Sequence
from .step_clock import StepClock
from .step_input import StepBuffers, StepInput, StepShape


class CudaRunner:
    """A `ModelRunner`, with everything that stays on the device between steps."""

    def __init__(
        self,
        model: PreTrainedModel,
        layers: dict[int, AttentionLayer],
        pool: KVPool,
        buckets: tuple[int, ...],
        largest_chunk: int,
        compiled: bool,
        batch_invariance: BatchInvariance = "tuned",
    ):
        """buckets: batch sizes to which decode steps are padded, ascending. compiled: compile the layers."""
        self.model = model
        self.clock = StepClock(model.device)
        rows = len(pool.block_table)
        self.largest = largest_chunk + rows
        self.decode_buckets, self.mixed_buckets = buckets, mixed_buckets(self.largest)
        self.graphs: CudaGraphs[tuple[Tensor, Tensor]] = CudaGraphs()
        """The captured graphs. Each returns logits [L, V] and drawn tokens int64 [L]."""
        self._rows = rows
        self._long_requests = follow_lengths(model, pool.block_table.shape, pool.page_size)
        self._forward = Forward(
            model,
            layers,
            pool.layers,
            as_op=True,
            batch_invariance=batch_invariance,
            states=pool.states,
            long_requests=self._long_requests,
        )
        self._compiled = compiled
        self._prepared = False
        self._buffers = StepBuffers(
            pool.block_table,
            pool.page_size,
            self.largest,
            model.device,
            static=True,
            batch_invariance=batch_invariance,
        )
        self._sampling = SamplingRows(rows, model.device)
        self._adjustments = LogitAdjustments(model.device)
        # int64 [rows + 1]: the token drawn last for each row; the last element is for padding.
        self._last_tokens = torch.zeros(rows + 1, dtype=torch.int64, device=model.device)

    def batches(self, schedule: Schedule) -> list[Schedule]:
        """Return the schedule as one mixed batch, so that weights are read once."""
        return [schedule] if schedule.num_tokens else []

    def run(self, batch: Schedule) -> StepResult:
        """Replay a graph, or launch the kernels one by one for a large batch."""
        self._prepare()
        sequences, shape = batch.sampled, self._shape(batch)
        if self._is_bucket(shape) and shape not in self.graphs:
            self._capture(shape)
        host = self._buffers.stage(batch.decode, batch.prefill, shape)
        self.clock.device_starts()
        self._sampling.take(sequences)
        if self._long_requests is not None:
            self._long_requests.take(batch.is_long_by_row)
        self._buffers.send(shape, len(batch.decode) + len(batch.prefill))
        if shape in self.graphs:
            logits, drawn = self.graphs.replay(shape)
        else:
            logits, drawn = self._compute(self._buffers.input(shape, host))
        rows: slice | Tensor = slice(0, len(sequences))
        scored: list[tuple[PrefillChunk, Tensor]] = []
        if batch.is_scored:
            sampled, slices = batch.rows_of_logits()
            scored = [(chunk, logits[at]) for chunk, at in zip(batch.prefill, slices, strict=True)]
            rows = to_device(torch.tensor(sampled, dtype=torch.int64), logits.device)
        logits, drawn = logits[rows], drawn[rows]
        asking = [index for index, sequence in enumerate(sequences) if sequence.adjusts_logits]
        if asking:
            positions = self._buffers.input(shape, host).sample_positions[rows]
            self._draw_again(asking, [sequences[index] for index in asking], logits, positions, drawn)
        return StepResult(sequences, logits, drawn, scored)

    def warm_up_tokens(self) -> list[int]:
        return mixed_warm_up_buckets(self.largest)

    def warm_up(self, num_tokens: int) -> None:
        """Capture the bucket; for sizes that are no bucket, run once to compile their kernels."""
        self._prepare()
        shape = self._mixed_shape(num_tokens)
        if self._is_bucket(shape):
            self._capture(shape)
        else:
            self._run_padding(shape)

    def warm_up_requests(self) -> list[int]:
        """Return the batch sizes to warm up: every bucket. The CUDA graph of a batch size is captured when a
        batch of that size first runs.
        """
        return list(self.decode_buckets)

    def _shape(self, batch: Schedule) -> StepShape:
        """Return the shape of the smallest bucket that the batch fits in, or of the batch itself if none
        does.
        """
        count = batch.num_tokens
        if batch.is_scored:
            return self._scored_shape(next((size for size in self.mixed_buckets if size >= count), count))
        if not batch.prefill:
            return self._buffers.decode_shape(next(size for size in self.decode_buckets if size >= count))
        return self._mixed_shape(next((size for size in self.mixed_buckets if size >= count), count))

    def _mixed_shape(self, num_tokens: int) -> StepShape:
        return self._buffers.shape(num_tokens, self._rows, self._rows)

    def _scored_shape(self, num_tokens: int) -> StepShape:
        """Return the shape of a step with room for prompt logprobs. Steps with prompt logprobs are rare, so
        there is no graph for them.
        """
        return self._buffers.shape(num_tokens, self._rows, self._rows + MOST_SCORED)

    def _is_bucket(self, shape: StepShape) -> bool:
        has_graph = shape.num_logits == self._rows and shape.num_tokens in self.mixed_buckets
        return shape.decode_only or has_graph

    def _capture(self, shape: StepShape) -> None:
        """Capture one bucket with a batch of padding only, so that nothing is stored."""
        kind = "decode step" if shape.decode_only else "mixed batch"
        report(JitEvent("graph capture", f"{kind} of {shape.num_tokens}"))
        self._buffers.stage([], [], shape)
        self._buffers.send(shape, 0)
        step = self._buffers.input(shape, None)
        self.graphs.capture(shape, lambda: self._compute(step))

    def _compute(self, step: StepInput) -> tuple[Tensor, Tensor]:
        """Return the logits and drawn tokens of the batch that was sent to the device."""
        unknown = self._last_tokens[step.attention.token_rows]
        token_ids = torch.where(step.token_ids >= 0, step.token_ids, unknown)
        logits = self._forward(token_ids, step.attention, step.logits_indices)
        drawn = self._sampling.draw(logits, step.sample_rows, step.sample_positions)
        self._last_tokens[step.sample_rows] = drawn
        return logits, drawn

    def _draw_again(
        self, asking: list[int], sequences: list[Sequence], logits: Tensor, positions: Tensor, drawn: Tensor
    ) -> None:
        """Draw again, outside the graph, for requests that adjust their logits.

        asking: the rows of these requests in logits [S, V], in positions int64 [S] and in drawn int64 [S];
        `drawn` is changed in place
        """
        indices = to_device(torch.tensor(asking), logits.device)
        rows = to_device(torch.tensor([sequence.row for sequence in sequences]), logits.device)
        adjusted = self._adjustments.apply(logits[indices], sequences)
        tokens = self._sampling.draw(adjusted, rows, positions[indices])
        self._adjustments.observe(sequences, tokens)
        drawn[indices] = tokens
        self._last_tokens[rows] = tokens

    def _run_padding(self, shape: StepShape) -> None:
        host = self._buffers.stage([], [], shape)
        self._buffers.send(shape, 0)
        self._compute(self._buffers.input(shape, host))

    @torch.inference_mode()
    def _meet_draws(self) -> None:
        """Compile the sampling kernel for the model's logits and for adjusted ones, which are float32."""
        device = self.model.device
        vocab_size = self.model.config.get_text_config(decoder=True).vocab_size
        no_row = torch.full((1,), self._rows, dtype=torch.int64, device=device)
        with torch.cuda.device_of(no_row):  # a thread begins with the first GPU
            for dtype in {self.model.dtype, torch.float32}:
                logits = torch.zeros(1, vocab_size, dtype=dtype, device=device)
                self._sampling.draw(logits, no_row, torch.zeros_like(no_row))

    def _prepare(self) -> None:
        """Compile the layers, and run the steps that have no graph; called once, before any capture."""
        if self._prepared:
            return
        self._prepared = True
        if self._compiled:
            triton_settings.settle()
        # Compiling layers waits for other processes; meanwhile this thread's kernel compiles.
        with ThreadPoolExecutor(1) as thread:
            draws = thread.submit(self._meet_draws)
            if self._compiled:
                self._forward.compile()
            draws.result()
        self._run_padding(self._scored_shape(min(self.mixed_buckets, default=self.largest)))
