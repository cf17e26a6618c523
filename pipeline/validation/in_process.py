"""The figures that need no server: what was loaded, and how close the artifact predicts to the baseline.

Both models are in memory only while this runs; the servers come after.
"""

import gc
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from ...layouts.errors import UserError
from ...layouts.experts import PackedExperts, is_experts, parameters_of
from ...layouts.linear import QuantizedLinear, packed_layers
from ...layouts.merged_linear import MergedLinear
from ...serving_check.answer_figures import ServedText, TokenText
from ...serving_check.checks.served_text import text_score
from ...serving_check.engine.options import UNQUANTIZED, EngineOptions
from ...serving_check.engine.stored_kv import OverStoredKV
from ...serving_check.evidence import Loaded, TextScore
from ...serving_check.quality import (
    Comparison,
    compare,
    continuation_nats,
    greedy_gaps,
    read_texts,
    token_windows,
)
from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.tokenizer import load_tokenizer
from ..conventions.kv_cache import kv_cache_of
from ..device import resolve_dtype
from ..model_loader.load_model import LoadedModel, load_model

HELD_OUT = Path(__file__).parents[2] / "serving_check" / "data" / "heldout.jsonl"
WINDOW = 512


@dataclass(frozen=True)
class HeldOutText:
    """The text that quality is measured on and that prompts are cut from."""

    tokenizer: Any
    windows: list[torch.Tensor]
    sha256: str

    @property
    def token_ids(self) -> list[int]:
        return torch.cat(self.windows).tolist()

    @property
    def token_text(self) -> TokenText:
        return TokenText(self._encode, self._decode)

    def _encode(self, text: str) -> Sequence[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


@dataclass(frozen=True)
class InProcessFigures:
    loaded: Loaded
    baseline_loaded: Loaded
    comparison: Comparison
    dtype: str
    baseline_dtype: str


@dataclass(frozen=True)
class LoadOptions:
    """How both are loaded; `layout` and `kv_cache_dtype` are for the artifact alone."""

    engine: EngineOptions
    """Its device is a concrete one."""
    baseline_dtype: str
    progress: bool


def read_held_out(path: Path | None, artifact: Checkpoint, baseline: Checkpoint, tokens: int) -> HeldOutText:
    """At most `tokens` tokens of `path`, or of the text that ships with Scalegate."""
    path = path or HELD_OUT
    tokenizer = load_tokenizer(artifact) or load_tokenizer(baseline)
    if tokenizer is None:
        raise UserError(
            f"neither {artifact.source} nor {baseline.source} has a tokenizer; add tokenizer.json"
        )
    try:
        content = path.read_bytes()
        windows = token_windows(tokenizer, read_texts(path), WINDOW, tokens)
    except OSError as error:
        raise UserError(f"cannot read the held-out text {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} is not held-out text; give plain UTF-8 text, "
            'or a .jsonl file with one {"text": ...} a line'
        ) from error
    if not windows:
        raise UserError(f"the held-out text {path} is empty; give a file with --text")
    return HeldOutText(tokenizer, windows, hashlib.sha256(content).hexdigest())


def take_figures(
    artifact: Checkpoint, baseline: Checkpoint, text: HeldOutText, options: LoadOptions
) -> InProcessFigures:
    """Load both, look at their layers, and compare their predictions."""
    ours = _load(artifact, options, options.engine.dtype, options.engine.layout)
    theirs = _load(baseline, options, options.baseline_dtype, None)
    loaded, baseline_loaded = _describe(ours), _describe(theirs)
    if loaded.vocab_size != baseline_loaded.vocab_size:
        raise UserError(
            f"{artifact.source} has a vocabulary of {loaded.vocab_size} tokens and {baseline.source} of "
            f"{baseline_loaded.vocab_size}: not the checkpoint it was made from; give that with --baseline"
        )
    total = sum(window.numel() for window in text.windows)
    with tqdm(total=total, desc="quality", unit="tok", disable=None if options.progress else True) as bar:
        comparison = compare(_as_served(ours, options, WINDOW), theirs.model, text.windows, bar.update)
    dtypes = [str(side.model.dtype).removeprefix("torch.") for side in (ours, theirs)]
    del ours, theirs
    _release_memory()
    return InProcessFigures(loaded, baseline_loaded, comparison, *dtypes)


class TextScorer:
    """How text lies to both models, which are loaded again for it: the servers have gone by then."""

    def __init__(self, artifact: Checkpoint, baseline: Checkpoint, options: LoadOptions, longest: int):
        """longest: tokens of a prompt and what followed it, at most"""
        ours = _load(artifact, options, options.engine.dtype, options.engine.layout)
        self._artifact = _as_served(ours, options, longest)
        self._baseline = _load(baseline, options, options.baseline_dtype, None).model

    def baseline_nats(self, prompt: Sequence[int], continuation: Sequence[int]) -> float:
        """Mean nats per token under the baseline."""
        return continuation_nats(self._baseline, prompt, continuation)

    def __call__(self, served: ServedText) -> TextScore:
        """Its tokens held to the logits of either model."""
        ours = greedy_gaps(self._artifact, served.prompt, served.tokens)
        theirs = greedy_gaps(self._baseline, served.prompt, served.tokens)
        return text_score(served.m, ours, theirs, served.text)


def _load(checkpoint: Checkpoint, options: LoadOptions, dtype: str, layout: str | None) -> LoadedModel:
    return load_model(
        checkpoint.folder,
        device=options.engine.device,
        dtype=resolve_dtype(dtype),
        layout=layout,
        progress=options.progress,
    )


def _as_served(loaded: LoadedModel, options: LoadOptions, longest: int) -> nn.Module:
    """The model with its keys and values as they are stored while it serves."""
    kv_cache = kv_cache_of(loaded.checkpoint, options.engine.kv_cache_dtype)
    if kv_cache.kv_format == UNQUANTIZED:
        return loaded.model
    return OverStoredKV(loaded.model, kv_cache.kv_format, kv_cache.scales, longest)


def _describe(loaded: LoadedModel) -> Loaded:
    return Loaded(
        linear_shapes=linear_shapes(loaded.model),
        vocab_size=int(loaded.model.config.get_text_config().vocab_size),
        layouts=loaded.layouts,
        packed=packed_layers(loaded.model),
        weight_bytes=weight_bytes(loaded.model),
    )


def weight_bytes(model: nn.Module) -> int:
    """Of all parameters and packed weights, those that are shared counted once."""
    tensors = [*model.parameters(), *model.buffers()]
    # oneDNN's own order of bytes has no storage that can be pointed at.
    return sum(
        {
            id(tensor) if tensor.is_mkldnn else tensor.data_ptr(): tensor.numel() * tensor.element_size()
            for tensor in tensors
        }.values()
    )


def linear_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """[N, K] of every linear layer by its own name, merged or not; [E, N, K] of a layer's experts."""
    shapes: dict[str, tuple[int, ...]] = {}
    inside: set[nn.Module] = set()
    for name, module in model.named_modules():
        if isinstance(module, MergedLinear):
            inside.add(module.merged)
            shapes[name] = module.out_features, module.in_features
        elif isinstance(module, nn.Linear | QuantizedLinear) and module not in inside:
            shapes[name] = module.out_features, module.in_features
        elif isinstance(module, PackedExperts):
            inside.add(module.experts)
            shapes |= {f"{name}.{parameter}": shape for parameter, shape in module.shapes().items()}
        elif is_experts(module) and module not in inside:
            shapes |= {
                f"{name}.{leaf}": tuple(weight.shape) for leaf, weight in parameters_of(module).items()
            }
    return shapes


def _release_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
