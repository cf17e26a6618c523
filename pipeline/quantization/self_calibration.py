"""Sequences drawn from the model itself: to calibrate on where no text is given, and beside one that is.

What a model writes is what it knows best, so that its inputs are like those of the text it was trained on
(LLM-QAT: Liu et al. 2023, arXiv 2305.17888). Half of what is read is its own, so that a text which shows few
of those inputs, or others, does no harm. The whole model is in memory while it writes.
"""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import tqdm
from transformers import DynamicCache, PreTrainedModel

from ...layouts.files import atomic_path
from ...layouts.progress import progress_bar
from ...serving_check.engine.kv_pool import free_memory
from ..checkpoints.checkpoint import Checkpoint
from ..model_loader.load_model import load_model

AT_ONCE = 64
"""Sequences drawn side by side."""
SEED = 20
MEMORY_FACTOR = 1.5
"""What a model that writes takes, of its weights' bytes."""


def can_draw(checkpoint: Checkpoint, device: torch.device) -> bool:
    """Whether the whole model fits into what memory is free."""
    weights = sum(path.stat().st_size for path in checkpoint.shards)
    return MEMORY_FACTOR * weights <= free_memory(device)


def beside(text: Tensor, own: Tensor) -> Tensor:
    """One of each in turn, int64 [2 S, T]: `text` thinned out evenly to the S sequences of `own`."""
    places = torch.linspace(0, len(text) - 1, len(own)).round().long()
    return torch.stack([text[places], own], 1).flatten(0, 1)


def drawn_sequences(
    checkpoint: Checkpoint, shape: tuple[int, int], device: torch.device, kept: Path, progress: bool
) -> Tensor:
    """int64 [sequences, tokens] from the model at temperature 1; the same numbers for the same device.

    kept: a file that they are read from if it is there, and written to otherwise
    """
    if not kept.is_file():
        model = load_model(checkpoint.folder, device=str(device), progress=progress).model
        count, tokens = shape
        parts = []
        generator = torch.Generator(device).manual_seed(SEED)
        with progress_bar(total=count * tokens, desc="drawing", unit="tok", shown=progress) as bar:
            for start in range(0, count, AT_ONCE):
                parts.append(_draw(model, min(AT_ONCE, count - start), tokens, generator, bar))
        kept.parent.mkdir(exist_ok=True)
        with atomic_path(kept) as partial:
            save_file({"sequences": torch.cat(parts)}, partial)
    return load_file(kept)["sequences"]


def _draw(model: PreTrainedModel, count: int, length: int, generator: torch.Generator, bar: tqdm) -> Tensor:
    """int64 [count, length] on the CPU; each begins as the model's texts do, or anywhere where none does."""
    config = model.config.get_text_config()
    device = model.device
    first = config.bos_token_id
    if isinstance(first, int):
        ids = torch.full((count, 1), first, device=device)
    else:
        ids = torch.randint(config.vocab_size, (count, 1), generator=generator, device=device)
    cache = DynamicCache(config=config)
    drawn = [ids]
    with torch.inference_mode():
        for _ in range(length - 1):
            logits = model(input_ids=drawn[-1], past_key_values=cache, use_cache=True).logits[:, -1].float()
            drawn.append(torch.multinomial(logits.softmax(-1), 1, generator=generator))
            bar.update(count)
    return torch.cat(drawn, 1).cpu()
