"""The text that quality is measured on and that prompts are cut from.

Not for measuring (`in_process.py`).
"""

import hashlib
import heapq
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...base.errors import UserError
from ...base.log import logger
from ...serving_check.engine.options import UNQUANTIZED
from ...serving_check.evidence.answer_figures import TokenText
from ...serving_check.quality import Document, read_documents
from ...serving_check.workload.use_plan import TURNS, WITH_SYSTEM, Conversations
from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.tokenizer import load_tokenizer
from ..model_loader.attention_shapes import has_states
from ..model_loader.vocabulary import refuse_unknown_tokens
from .loaded_config import changes_beyond

HELD_OUT = Path(__file__).parents[2] / "serving_check" / "data" / "heldout.jsonl"
"""The text on which every validation measures quality; the README beside it describes it."""
WINDOW, LONG_WINDOW = 512, 2048
"""The tokens of a window. Windows are long if keys and values are quantized: formats keep the first and the
last tokens in 16 bits, and scored tokens must attend mostly to quantized ones. Windows are long for recurrent
layers too: their states accumulate the errors of all earlier tokens."""


@dataclass(frozen=True)
class HeldOutText:
    """The text that quality is measured on and that prompts are cut from."""

    tokenizer: Any
    windows: list[Tensor]
    domains: list[str]
    """The domain of each window, such as `code`."""
    token_ids: list[int]
    """The tokens from which prompts are cut: the windows' tokens, and more of the text for long prompts."""
    sha256: str
    foreign: Mapping[str, float] = field(default_factory=dict)
    """Domains that were left out since the baseline cannot predict them, with the bits per byte that it
    needs."""

    @property
    def token_text(self) -> TokenText:
        return TokenText(self._encode, self._decode)

    @property
    def end_token(self) -> int | None:
        """Return the tokenizer's end-of-sequence token; None if it has none."""
        return self.tokenizer.eos_token_id

    @property
    def conversations(self) -> Conversations | None:
        """Return the function that turns conversations into tokens; None if no chat template renders plain
        ones.
        """
        if not self.tokenizer.chat_template:
            return None
        refused = {roles: error for roles in (*TURNS, *WITH_SYSTEM) if (error := self._refusal(roles))}
        if refused.keys() & set(TURNS):
            error = next(iter(refused.values()))
            logger.warning(f"the chat template renders no plain conversation, so none is sent: {error}")
            return None
        taken = tuple(roles for roles in (*TURNS, *WITH_SYSTEM) if roles not in refused)
        return Conversations(self._decode, self._chat, taken, self._encode_whole)

    def _refusal(self, roles: Sequence[str]) -> Exception | None:
        """Return the error that the chat template raises for messages of these roles; None if it accepts
        them.
        """
        try:
            self._chat([(role, "text") for role in roles])
        except Exception as error:  # templates raise what they like
            return error
        return None

    def _chat(self, messages: Sequence[tuple[str, str]]) -> Sequence[int]:
        turns = [{"role": role, "content": content} for role, content in messages]
        return self.tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)

    def _encode_whole(self, text: str) -> Sequence[int]:
        """Return a prompt's tokens, with the special ones that the tokenizer adds."""
        return self.tokenizer(text)["input_ids"]

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
    without: Collection[str] = (),
) -> HeldOutText:
    """Read windows of `window` tokens of `path`, or of the text that ships with Scalegate.

    At most `tokens` are predicted, with equal numbers for the domains as far as the text allows.
    Long windows go on from one document of a domain to the next, so that all are full.
    prompt:  tokens of a prompt; if the text is shorter than two prompts, it is repeated
    without: domains that are left out
    """
    path = path or HELD_OUT
    tokenizer = load_tokenizer(artifact) or load_tokenizer(baseline)
    if tokenizer is None:
        raise UserError(
            f"neither {artifact.source} nor {baseline.source} has a tokenizer; add tokenizer.json"
        )
    try:
        content = path.read_bytes()
        documents = [document for document in read_documents(path) if document.domain not in without]
    except OSError as error:
        raise UserError(f"cannot read the held-out text {path}: {error.strerror}") from error
    except ValueError as error:
        raise UserError(
            f"{path} is not held-out text: {error}; give plain UTF-8 text, "
            'or a .jsonl file with one {"text": ...} a line'
        ) from error
    # Of long windows as many as `tokens` fill: a short one more would have no quantized key.
    predictions = tokens if window <= WINDOW else tokens - max(1, tokens // window)
    chosen = _spread(_windows(tokenizer, documents, window), predictions)
    if not chosen:
        raise UserError(f"the held-out text {path} is empty; give another")
    windows = [window for _, window in chosen]
    pool = windows
    if tokens < 2 * prompt:
        pool = [window for _, window in _spread(_windows(tokenizer, documents, WINDOW), 2 * prompt)]
    for checkpoint in (artifact, baseline):
        refuse_unknown_tokens(torch.cat([*windows, *pool]), tokenizer, checkpoint)
    token_ids = torch.cat(pool).tolist()
    if len(token_ids) < 2 * prompt:
        token_ids = list(islice(cycle(token_ids), len(token_ids) + prompt - 1))
    digest = hashlib.sha256(content).hexdigest()
    return HeldOutText(tokenizer, windows, [domain for domain, _ in chosen], token_ids, digest)


def _windows(tokenizer: Any, documents: Sequence[Document], length: int) -> dict[str, list[Iterator[Tensor]]]:
    """Return, for each domain, the windows of each document, int64 [<= length]; the documents are joined
    first if windows are long.
    """
    by_domain: dict[str, list[str]] = {}
    for document in documents:
        by_domain.setdefault(document.domain, []).append(document.text)
    if length <= WINDOW:
        return {
            domain: [_windows_of(tokenizer, text, length) for text in texts]
            for domain, texts in by_domain.items()
        }
    joined = {
        domain: list(_windows_of(tokenizer, "\n".join(texts), length)) for domain, texts in by_domain.items()
    }
    full = {
        domain: [window for window in windows if len(window) == length] for domain, windows in joined.items()
    }
    return {domain: [iter(windows)] for domain, windows in (full if any(full.values()) else joined).items()}


def _windows_of(tokenizer: Any, text: str, length: int) -> Iterator[Tensor]:
    """Yield consecutive windows that do not overlap. The first token of each window is not predicted."""
    ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=torch.int64)
    yield from (window for window in ids.split(length) if len(window) >= 2)


def _spread(windows: Mapping[str, Sequence[Iterator[Tensor]]], predictions: int) -> list[tuple[str, Tensor]]:
    """Return at most `predictions` tokens after the windows' first ones, in the order of domains and
    documents.

    The next window is of the domain, and in the domain of the document, that has given the fewest tokens so
    far.
    """
    documents = {
        domain: [(0, position, each) for position, each in enumerate(of_domain)]
        for domain, of_domain in windows.items()
    }
    domains = [(0, order, domain) for order, domain in enumerate(documents)]
    chosen: list[tuple[int, int, str, Tensor]] = []
    total = 0
    while domains and total < predictions:
        of_domain, order, domain = heapq.heappop(domains)
        of_document, position, more = heapq.heappop(documents[domain])
        window = next(more, None)
        if window is not None:
            window = window[: predictions - total + 1]
            predicted = len(window) - 1
            total += predicted
            of_domain += predicted
            chosen.append((order, position, domain, window))
            heapq.heappush(documents[domain], (of_document + predicted, position, more))
        if documents[domain]:
            heapq.heappush(domains, (of_domain, order, domain))
    return [(domain, window) for _, _, domain, window in sorted(chosen, key=lambda each: each[:2])]


def window_for(artifact: Checkpoint, baseline: Checkpoint, kv_format: str, tokens: int) -> int:
    """Return the tokens of a window that quality is measured on.

    Windows are long for quantized keys and for recurrent layers. If either config changes the computation
    from some position on (a stretched rope, a sliding window), windows reach beyond that position, as far as
    the context and `tokens` allow.
    """
    is_long = kv_format != UNQUANTIZED or any(map(has_states, (artifact, baseline)))
    window = LONG_WINDOW if is_long else WINDOW
    changes = [position for side in (artifact, baseline) for position in changes_beyond(side.config)]
    reached = [position + WINDOW for position in changes if position + WINDOW <= tokens]
    contexts = [side.context for side in (artifact, baseline) if side.context is not None]
    return min(max(window, *reached, 0), *contexts) if contexts else max(window, *reached, 0)
