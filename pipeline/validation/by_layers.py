"""Models that fit into no memory whole, run one decoder layer at a time: each layer is read from disk, run
and forgotten.

Weights are dequantized instead of multiplied by a layout's kernel, inputs are rounded if the checkpoint says
so, and keys and values are unquantized: the figures describe the checkpoint, not an engine's arithmetic. The
verdict says so.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import psutil
import torch
from torch import Tensor, nn

from ...base.progress import progress_bar
from ...serving_check.adapters.all_engines import engine_named
from ...serving_check.evidence.evidence import ModelFigures
from ...serving_check.evidence.served_in_use import ServedInUse
from ...serving_check.gate.gate import RunFigures
from ...serving_check.quality import continuation_logits
from ..checkpoints.checkpoint import Checkpoint
from ..model_loader.layer_stream import LayerStream
from .held_out import HeldOutText
from .in_process import (
    InProcessFigures,
    TextScorer,
    compare_texts,
    linear_shapes,
    refuse_other_vocabulary,
)
from .known_text import without_foreign
from .run import Run

WEIGHTS_FACTOR = 1.1
BESIDE = 4 << 30
"""Bytes for activations and logits."""
PADDED_TOKENS = 1 << 16
"""The most tokens, padding included, of scored answers under a load as in use: eight times the held-out
text."""


class Output(NamedTuple):
    """The part of a transformers model's output that is read here."""

    logits: Tensor


class ModelByLayers(nn.Module):
    """A checkpoint that has read some texts; it gives its logits on these texts only."""

    def __init__(self, checkpoint: Checkpoint, texts: Sequence[Tensor], device: str, progress: bool):
        """texts: int64 [T] each; only one layer's weights and one text's hidden states are in memory"""
        super().__init__()
        # What follows a text does not reach back into it: padding changes nothing before it.
        padded = nn.utils.rnn.pad_sequence(list(texts), batch_first=True)
        self._rows = {tuple(text.tolist()): row for row, text in enumerate(texts)}
        with torch.no_grad():
            self._stream = LayerStream(checkpoint, padded, torch.device(device), round_inputs=True)
            bar = progress_bar(self._stream.layers, desc="layers", shown=progress)
            for name in bar:
                self._stream.place(name)
                self._stream.advance(name)
                self._stream.drop(name)
            self._outputs = self._stream.empty_states()
            for start, output in zip(self._stream.starts(), self._stream.outputs(), strict=True):
                self._outputs.write(start, output)
        self.embeddings = self._stream.model.get_input_embeddings()

    def forward(self, input_ids: Tensor, use_cache: bool = False, logits_to_keep: int = 0) -> Output:
        """Return logits [B, T, V] of texts that were read, int64 [B, T], or of their last positions."""
        rows = [self._rows[tuple(ids)] for ids in input_ids.tolist()]
        hidden = torch.cat([self._outputs.read(row, row + 1) for row in rows])[:, : input_ids.shape[1]]
        hidden = hidden[:, -logits_to_keep:].to(input_ids.device)
        return Output(self._stream.predictions(hidden))

    def continuations(self, texts: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Iterator[Tensor]:
        """Yield, for each prompt and its continuation, the logits [tokens, V] that predict the continuation.
        Only whole texts are known here, so they are not padded.
        """
        return (continuation_logits(self, *text) for text in texts)

    def describe(self) -> ModelFigures:
        model = self._stream.model
        return ModelFigures(linear_shapes(model), int(model.config.get_text_config().vocab_size))

    @property
    def dtype(self) -> str:
        return str(self._stream.model.dtype).removeprefix("torch.")


def needs_layers(run: Run) -> bool:
    """Say whether both models are too large to be loaded together here. If our own server runs them, they are
    not too large, since each must then fit into the memory of one GPU."""
    engines = run.asked.engine, run.asked.engine_of_baseline
    if any(engine_named(engine).packs_with_layouts for engine in engines):
        return False
    sides = (run.artifact, run.baseline)
    files = sum(path.stat().st_size for side in sides for path in side.shards)
    return WEIGHTS_FACTOR * files + BESIDE > free_bytes(run.options.device)


def free_bytes(device: str) -> int:
    if device.startswith("cuda"):
        return int(torch.cuda.mem_get_info(torch.device(device))[0])
    return int(psutil.virtual_memory().available)


def figures_by_layers(
    run: Run, text: HeldOutText, given: HeldOutText | None = None
) -> tuple[InProcessFigures, HeldOutText]:
    """Return the result of `figures_of`, computed with one layer in memory at a time, and the text that it
    was measured on.

    Domains that the baseline cannot predict are read, too, and left out afterwards: asking the baseline first
    would be one more reading of its files.
    """
    device, progress = run.options.device, run.progress
    windows = [*text.windows, *(given.windows if given else [])]
    ours = ModelByLayers(run.artifact, windows, device, progress)
    loaded = ours.describe()
    theirs = ModelByLayers(run.baseline, windows, device, progress)
    baseline_loaded = theirs.describe()
    refuse_other_vocabulary(run.artifact, loaded, run.baseline, baseline_loaded)
    text = without_foreign(theirs, text)
    comparison, by_domain, of_given = compare_texts(ours, theirs, text, given)
    figures = InProcessFigures(
        loaded, baseline_loaded, comparison, ours.dtype, theirs.dtype, by_domain, of_given, by_layers=True
    )
    return figures, text


def scorer_by_layers(run: Run, served: RunFigures, in_use: Sequence[ServedInUse] = ()) -> TextScorer:
    """Return the scorer of the texts that were served, and of no other texts."""
    canaries = (*served.canary, *served.baseline_canary)
    read = {(*canary.prompt, *canary.tokens) for canary in canaries}
    read |= {(*answer.prompt, *answer.tokens) for answer in served.texts}
    greedy = {(*answer.prompt, *answer.tokens) for answer in in_use if answer.kind != "sampled"}
    sampled = {(*answer.prompt, *answer.tokens) for answer in in_use if answer.kind == "sampled"}
    device, progress = run.options.device, run.progress
    return TextScorer(
        ModelByLayers(run.artifact, _tensors(read | greedy | sampled), device, progress),
        ModelByLayers(run.baseline, _tensors(read | greedy), device, progress),
    )


def within_padding(answers: Sequence[ServedInUse]) -> tuple[ServedInUse, ...]:
    """Return the answers with the shortest contexts: as many as take `PADDED_TOKENS` if all are padded to the
    longest.
    """
    shortest = sorted(answers, key=lambda answer: answer.context)
    counts = (count for count, answer in enumerate(shortest, 1) if count * answer.context <= PADDED_TOKENS)
    return tuple(shortest[: max(counts, default=0)])


def _tensors(texts: set[tuple[int, ...]]) -> list[Tensor]:
    return [torch.tensor(ids) for ids in sorted(texts)]
