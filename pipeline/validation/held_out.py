"""The text that quality is measured on and that prompts are cut from.

Not for measuring (`in_process.py`).
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch

from ...base.errors import UserError
from ...serving_check.engine.options import UNQUANTIZED
from ...serving_check.evidence.answer_figures import TokenText
from ...serving_check.quality import read_texts, token_windows
from ...serving_check.workload.use_plan import Conversations
from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.tokenizer import load_tokenizer
from ..model_loader.vocabulary import refuse_unknown_tokens
from .loaded_config import changes_beyond

HELD_OUT = Path(__file__).parents[2] / "serving_check" / "data" / "heldout.jsonl"
WINDOW, LONG_WINDOW = 512, 2048
"""Tokens read at once; the long one where keys and values are quantized, so that most of those are that a
scored token attends to: formats keep the first tokens, and the last, in 16 bits."""


@dataclass(frozen=True)
class HeldOutText:
    """The text that quality is measured on and that prompts are cut from."""

    tokenizer: Any
    windows: list[torch.Tensor]
    token_ids: list[int]
    """What prompts are cut from: the windows' tokens, and more of the text for long prompts."""
    sha256: str

    @property
    def token_text(self) -> TokenText:
        return TokenText(self._encode, self._decode)

    @property
    def end_token(self) -> int | None:
        """The tokenizer's end-of-sequence token; None where it has none."""
        return self.tokenizer.eos_token_id

    @property
    def conversations(self) -> Conversations | None:
        """How conversations become tokens; None where there is no chat template."""
        return Conversations(self._decode, self._chat) if self.tokenizer.chat_template else None

    def _chat(self, messages: Sequence[tuple[str, str]]) -> Sequence[int]:
        turns = [{"role": role, "content": content} for role, content in messages]
        return self.tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)

    def _encode(self, text: str) -> Sequence[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def read_held_out(
    path: Path | None,
    artifact: Checkpoint,
    baseline: Checkpoint,
    tokens: int,
    window: int = WINDOW,
    prompt: int = 0,
) -> HeldOutText:
    """Windows of `window` tokens of `path`, or of the text that ships with Scalegate.

    At most `tokens` are predicted.
    Long windows go on from one document to the next, so that all are full.
    prompt: tokens of a prompt; where the text has fewer than two of them, prompts begin it again at its end
    """
    path = path or HELD_OUT
    tokenizer = load_tokenizer(artifact) or load_tokenizer(baseline)
    if tokenizer is None:
        raise UserError(
            f"neither {artifact.source} nor {baseline.source} has a tokenizer; add tokenizer.json"
        )
    try:
        content = path.read_bytes()
        texts = read_texts(path)
        texts = ["\n".join(texts)] if window > WINDOW else texts
        # Of long windows as many as `tokens` fill: a short one more would have no quantized key.
        predictions = tokens if window <= WINDOW else tokens - max(1, tokens // window)
        windows = token_windows(tokenizer, texts, window, predictions)
        pool = windows if tokens >= 2 * prompt else token_windows(tokenizer, texts, WINDOW, 2 * prompt)
    except OSError as error:
        raise UserError(f"cannot read the held-out text {path}: {error.strerror}") from error
    except ValueError as error:
        raise UserError(
            f"{path} is not held-out text: {error}; give plain UTF-8 text, "
            'or a .jsonl file with one {"text": ...} a line'
        ) from error
    if not windows:
        raise UserError(f"the held-out text {path} is empty; give a file with --text")
    for checkpoint in (artifact, baseline):
        refuse_unknown_tokens(torch.cat([*windows, *pool]), tokenizer, checkpoint)
    token_ids = torch.cat(pool).tolist()
    if len(token_ids) < 2 * prompt:
        token_ids = list(islice(cycle(token_ids), len(token_ids) + prompt - 1))
    return HeldOutText(tokenizer, windows, token_ids, hashlib.sha256(content).hexdigest())


def window_for(artifact: Checkpoint, baseline: Checkpoint, kv_format: str, tokens: int) -> int:
    """Tokens of a window that quality is measured on.

    Long ones for quantized keys, and longer ones where either config computes otherwise from some position on
    (a stretched rope, a sliding window): then they reach beyond it, within the context and `tokens`, which is
    all that is measured.
    """
    window = WINDOW if kv_format == UNQUANTIZED else LONG_WINDOW
    changes = [position for side in (artifact, baseline) for position in changes_beyond(side.config)]
    reached = [position + WINDOW for position in changes if position + WINDOW <= tokens]
    contexts = [side.context for side in (artifact, baseline) if side.context is not None]
    return min(max(window, *reached, 0), *contexts) if contexts else max(window, *reached, 0)
