"""Sequences drawn from the model itself: to calibrate on where no text is given, and beside one that is.

What a model writes is what it knows best, so that its inputs are like those of the text it was trained on
(LLM-QAT: Liu et al. 2023, arXiv 2305.17888). Half of what is read is its own, so that a text which shows few
of those inputs, or others, does no harm. The whole model is in memory while it writes: in its own precision
if it is small, otherwise with its linear layers in INT4.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from tqdm import tqdm
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from ....base.atomic_files import atomic_path
from ....base.errors import UserError
from ....base.progress import progress_bar
from ....serving_check.engine.kv_pool import free_memory
from ...checkpoints.checkpoint import Checkpoint
from ...machine.malloc_trim import return_freed_memory
from ...model_loader.attention_shapes import attention_layers_of
from ...model_loader.load_model import load_model
from .graph_sampler import GraphSampler, chosen
from .rounded_weights import rounded_weights

AT_ONCE = 64
"""Sequences drawn side by side, at most."""
SEED = 20
LARGEST_PLAIN = {"cpu": 2 << 30, "cuda": 16 << 30}
"""Bytes of weights up to which a model writes as it is, by the device's type."""
KV_BYTES = {"cpu": 1 << 30, "cuda": 7 << 29}
"""Of all keys and values of the sequences that are drawn side by side."""
PLAIN_MEMORY, ROUNDED_MEMORY = 1.5, 0.6
"""What a model that writes takes, of its weights' bytes."""


def can_draw(checkpoint: Checkpoint, device: torch.device) -> bool:
    """Whether the whole model fits into what memory is free."""
    factor = PLAIN_MEMORY if _writes_as_it_is(checkpoint, device) else ROUNDED_MEMORY
    return factor * _weight_bytes(checkpoint) <= free_memory(device)


def beside(text: Tensor, own: Tensor) -> Tensor:
    """One of each in turn, int64 [2 S, T]: `text` thinned out evenly to the S sequences of `own`."""
    places = torch.linspace(0, len(text) - 1, len(own)).round().long()
    return torch.stack([text[places], own], 1).flatten(0, 1)


def sample_sequences(
    checkpoint: Checkpoint, shape: tuple[int, int], device: torch.device, kept: Path, progress: bool
) -> Tensor:
    """int64 [sequences, tokens] from the model at temperature 1; the same numbers for the same device.

    kept: a file that they are read from if it is there, and written to otherwise
    Raises UserError where the model does not fit into memory.
    """
    if not kept.is_file():
        if not can_draw(checkpoint, device):
            raise UserError(
                f"{checkpoint.source} does not fit into memory, so it cannot generate a calibration text; "
                "give one with --calibration: a file, or hub:OWNER/NAME"
            )
        instead = None if _writes_as_it_is(checkpoint, device) else rounded_weights(checkpoint, device)
        model = load_model(checkpoint, device=device, progress=progress, instead=instead).model
        count, tokens = shape
        at_once = sequences_at_once(checkpoint, tokens, device)
        if device.type == "cuda":
            # What loading took on the way stays reserved otherwise, beside keys and values.
            torch.cuda.empty_cache()
        recorded = _recorded(model, min(at_once, count), tokens)
        parts = []
        generator = torch.Generator(device).manual_seed(SEED)
        with progress_bar(total=count * tokens, desc="drawing", unit="tok", shown=progress) as bar:
            for start in range(0, count, at_once):
                few = min(at_once, count - start)
                drawn = few if recorded is None else recorded.count
                parts.append(_draw(model, drawn, tokens, generator, bar, recorded)[:few])
        del model, recorded
        return_freed_memory()
        kept.parent.mkdir(exist_ok=True)
        with atomic_path(kept) as partial:
            save_file({"sequences": torch.cat(parts)}, partial)
    return load_file(kept)["sequences"]


def sequences_at_once(checkpoint: Checkpoint, tokens: int, device: torch.device) -> int:
    """How many sequences of `tokens` are drawn side by side: what their keys and values leave room for."""
    shapes = [layer.shape for layer in attention_layers_of(checkpoint, None, device).values()]
    of_a_token = sum(
        shape.heads * (shape.key_dim + shape.value_dim) * shape.dtype.itemsize for shape in shapes
    )
    return max(1, min(AT_ONCE, KV_BYTES[device.type] // (of_a_token * tokens)))


def _writes_as_it_is(checkpoint: Checkpoint, device: torch.device) -> bool:
    return _weight_bytes(checkpoint) <= LARGEST_PLAIN[device.type]


def _weight_bytes(checkpoint: Checkpoint) -> int:
    return sum(path.stat().st_size for path in checkpoint.shards)


def _recorded(model: PreTrainedModel, count: int, length: int) -> GraphSampler | None:
    """A step of `model` that is recorded; None where it cannot be."""
    if model.device.type == "cpu" or not GraphSampler.can_record(model):
        return None
    drawing = GraphSampler(model, count, length)
    with torch.inference_mode():
        return drawing if drawing.record() else None


def _draw(
    model: PreTrainedModel,
    count: int,
    length: int,
    generator: torch.Generator,
    bar: tqdm,
    recorded: GraphSampler | None = None,
) -> Tensor:
    """int64 [count, length] on the CPU; each begins as the model's texts do, or anywhere where none does.

    recorded: a step for as many sequences of that length, where there is one
    """
    config = model.config.get_text_config()
    device = model.device
    first = config.bos_token_id
    if isinstance(first, int):
        ids = torch.full((count, 1), first, device=device)
    else:
        ids = torch.randint(config.vocab_size, (count, 1), generator=generator, device=device)
    drawn = [ids]
    if recorded is not None:
        with torch.inference_mode():
            recorded.begin(ids)
            for _ in range(length - 1):
                drawn.append(recorded.next(torch.rand(count, 1, generator=generator, device=device)))
                bar.update(count)
        return torch.cat(drawn, 1).cpu()
    cache = DynamicCache(config=config)
    cache.layers = [
        _PreallocatedLayer(length) if type(layer) is DynamicLayer else layer for layer in cache.layers
    ]
    with torch.inference_mode(), _GroupedHeads():
        for _ in range(length - 1):
            logits = model(input_ids=drawn[-1], past_key_values=cache, use_cache=True).logits[:, -1].float()
            drawn.append(chosen(logits, torch.rand(count, 1, generator=generator, device=device)))
            bar.update(count)
    return torch.cat(drawn, 1).cpu()


class _PreallocatedLayer(DynamicLayer):
    """Keys and values of one layer, with room for all of a sequence's tokens from the first one on: to copy
    all of them at every token takes longer than the model does."""

    def __init__(self, length: int):
        super().__init__()
        self._length, self._used = length, 0

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self._keys, self._values = map(self._room, (key_states, value_states))
        new = slice(self._used, self._used + key_states.shape[2])
        self._keys[:, :, new], self._values[:, :, new] = key_states, value_states
        self._used = new.stop
        self.keys, self.values = self._keys[:, :, : new.stop], self._values[:, :, : new.stop]
        return self.keys, self.values

    def _room(self, states: Tensor) -> Tensor:
        count, heads, _, size = states.shape
        return states.new_empty(count, heads, self._length, size)


class _GroupedHeads(TorchFunctionMode):
    """Within it, query heads that share keys attend to them as if they were one head's tokens, where there
    is one token: on the CPU four times as fast."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if func is scaled_dot_product_attention and given.get("enable_gqa") and len(args) == 3:
            query, key, value = args
            count, heads, tokens, size = query.shape
            if tokens == 1 and given.get("attn_mask") is None:
                together = query.reshape(count, key.shape[1], -1, size)
                output = func(together, key, value, **(given | {"enable_gqa": False}))
                return output.reshape(count, heads, 1, -1)
        return func(*args, **given)
