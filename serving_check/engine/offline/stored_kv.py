"""A model that attends over keys and values as a KV format stores them, for given texts.

The module serves to measure the quality of KV formats: it computes what serving computes. No tokens are drawn
and nothing is scheduled.
"""

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Rows
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from ....layouts.kv.format import KV_FORMATS
from ....layouts.kv.layer import KVScales
from ..attention import served_layers
from ..compiling.cuda_graphs import CudaGraphs
from ..forward import Forward
from ..kv_pool import KVPool, pages_for
from ..request import SamplingParams
from ..scheduler import PrefillChunk
from ..sequence import Sequence
from ..step_input import StepBuffers, StepShape


class StoredKVModel(nn.Module):
    """Wraps `model`, which then belongs to it, for `batch` texts at once of at most `max_tokens` each."""

    def __init__(
        self,
        model: PreTrainedModel,
        kv_format: str,
        scales: Mapping[int, KVScales],
        max_tokens: int,
        batch: int = 1,
    ):
        super().__init__()
        self.model, self.batch = model, batch
        layers = served_layers(model)
        stored, device = KV_FORMATS[kv_format], model.device
        page_size = stored.page_size(device)
        pages = batch * pages_for(max_tokens, page_size)
        self.pool = KVPool(layers, stored, scales, pages, page_size, batch, max_tokens, device)
        self.step_buffers = StepBuffers(
            self.pool.block_table, page_size, max_tokens, device, static=device.type == "cuda"
        )
        self._run = Forward(model, layers.attention, self.pool.layers, as_op=False, states=self.pool.states)
        self._graphs: CudaGraphs[Tensor] | None = CudaGraphs() if self.step_buffers.static else None
        """CUDA graphs of decode steps by shape: without them, launches would take longer than the kernels."""

    def forward(self, input_ids: Tensor, logits_to_keep: int = 0, **options: Any) -> CausalLMOutput:
        """Return logits [B, L, V] of the last `logits_to_keep` tokens of input_ids, int64 [B, T]; 0 stands
        for all.

        In each text, the tokens before the kept ones are prefilled. The kept tokens are decoded one at a
        time, for all texts together, since a format may attend over other keys in prefill than in decoding.
        """
        prompt = input_ids.shape[1] - max(logits_to_keep - 1, 0)
        texts = [
            Sequence(str(index), tokens, prompt, SamplingParams(), 0, input_ids.shape[1] + 1)
            for index, tokens in enumerate(input_ids[:, :prompt].tolist())
        ]
        for text in texts:
            self.pool.admit(text)
        try:
            prefilled = [self._prefill(text, keep_all=not logits_to_keep) for text in texts]
            decoded = [self._decode(texts, column) for column in input_ids[:, prompt:].T.tolist()]
            return CausalLMOutput(logits=torch.cat([torch.stack(prefilled), *decoded], dim=1))
        finally:
            for text in texts:
                self.pool.release(text)

    def continuations(self, texts: Rows[tuple[Rows[int], Rows[int]]]) -> Iterator[Tensor]:
        """Return, for each prompt and its continuation, the logits [tokens, V] that predict each token of the
        continuation.

        Continuations of any lengths are decoded together, `batch` texts at a time.
        """
        for start in range(0, len(texts), self.batch):
            yield from self._continued(texts[start : start + self.batch])

    @torch.inference_mode()
    def _continued(self, texts: Rows[tuple[Rows[int], Rows[int]]]) -> list[Tensor]:
        """Return the logits for at most `batch` texts."""
        sequences = [
            Sequence(str(at), list(prompt), len(prompt), SamplingParams(), 0, len(prompt) + len(followed))
            for at, (prompt, followed) in enumerate(texts)
        ]
        for sequence in sequences:
            self.pool.admit(sequence)
        try:
            logits = [[self._prefill(sequence, keep_all=False)] for sequence in sequences]
            for step in range(max(len(followed) for _, followed in texts) - 1):
                left = [index for index, (_, followed) in enumerate(texts) if len(followed) > step + 1]
                tokens = [texts[index][1][step] for index in left]
                decoded = self._decode([sequences[index] for index in left], tokens)
                for index, row in zip(left, decoded, strict=True):
                    logits[index].append(row)
            return [torch.cat(rows) for rows in logits]
        finally:
            for sequence in sequences:
                self.pool.release(sequence)

    def _prefill(self, text: Sequence, keep_all: bool) -> Tensor:
        """Return logits of all tokens [T, V], or of the last token only [1, V]."""
        shape = self.step_buffers.shape(text.length, 1, 1)
        host = self.step_buffers.stage([], [PrefillChunk(text, 0, text.length)], shape)
        self.step_buffers.send(shape, 1)
        step = self.step_buffers.input(shape, host)
        first = 0 if keep_all else text.length - 1
        kept = torch.arange(first, text.length, device=self.model.device)
        return self._run(step.token_ids, step.attention, kept)

    def _decode(self, texts: list[Sequence], tokens: list[int]) -> Tensor:
        """Return logits [B, 1, V] of one decode step, in which each text gets its next token."""
        for text, token in zip(texts, tokens, strict=True):
            text.tokens.append(token)
            self.pool.grow(text)
        shape = self.step_buffers.decode_shape(len(texts))
        if self._graphs is not None and shape not in self._graphs:
            self._capture(shape, self._graphs)
        host = self.step_buffers.stage(texts, [], shape)
        self.step_buffers.send(shape, len(texts))
        if self._graphs is not None:
            return self._graphs.replay(shape).clone()[:, None]
        step = self.step_buffers.input(shape, host)
        return self._run(step.token_ids, step.attention, None)[:, None]

    def _capture(self, shape: StepShape, graphs: CudaGraphs[Tensor]) -> None:
        """Capture with a batch of padding only, so that nothing is stored."""
        self.step_buffers.stage([], [], shape)
        self.step_buffers.send(shape, 0)
        step = self.step_buffers.input(shape, None)
        graphs.capture(shape, lambda: self._run(step.token_ids, step.attention, None))
