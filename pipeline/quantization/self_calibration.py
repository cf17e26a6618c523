"""Sequences drawn from the model itself, for calibrating where no text is given.

What a model writes is what it knows best, so that its inputs are like those of the text it was trained on
(LLM-QAT: Liu et al. 2023, arXiv 2305.17888). The whole model is in memory while it writes.
"""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import tqdm
from transformers import DynamicCache, PreTrainedModel

from ...layouts.files import atomic_path
from ...layouts.progress import progress_bar
from ..checkpoints.checkpoint import Checkpoint
from ..model_loader.load_model import load_model

AT_ONCE = 64
"""Sequences drawn side by side."""
SEED = 20


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
