"""The text that a calibrated quantizer reads: from a file, from a dataset on the Hub, or the model's own.

`self_calibration.py` generates the model's own text; `calibration.py` reads the text.
"""

import hashlib
import importlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ....base.errors import UserError
from ....serving_check.quality import read_texts, token_windows
from ...checkpoints.checkpoint import Checkpoint
from ...checkpoints.tokenizer import load_tokenizer
from ...model_loader.vocabulary import refuse_unknown_tokens
from ...records.recipe import HUB, SELF, calibration_name

SEQUENCES, SEQUENCE_TOKENS = 512, 512
HUB_FORM = f"{HUB}OWNER/NAME[/CONFIGURATION][@REVISION][:SPLIT[:COLUMN]]"
"""The form of a data set's name; the split is `train` and the column `text` unless others are named."""


@dataclass(frozen=True)
class CalibrationText:
    """name:       what `--calibration` takes, as `calibration_name` has it
    shape:      sequences, at most 512, and the tokens of each, 512
    sequences:  int64 [shape]; None if the model is still to draw them
    parameters: the properties of the text that decide an artifact's bytes
    """

    name: str
    shape: tuple[int, int]
    sequences: Tensor | None
    parameters: dict[str, Any]


def read_calibration_text(checkpoint: Checkpoint, source: str) -> CalibrationText:
    """Return the beginning of the text named `source`, in tokens. Raise UserError if the text is unreadable
    or too short.
    """
    if source == SELF:
        shape = SEQUENCES, SEQUENCE_TOKENS
        return CalibrationText(SELF, shape, None, {"drawn": list(shape)})
    tokenizer = load_tokenizer(checkpoint)
    if tokenizer is None:
        raise UserError(
            f"{checkpoint.source} has no tokenizer, which --calibration needs; add tokenizer.json"
        )
    if source.startswith(HUB):
        windows = _windows(tokenizer, _dataset_texts(source))
        digest = hashlib.sha256(b"".join(window.numpy().tobytes() for window in windows)).hexdigest()
    else:
        windows, digest = _file_windows(tokenizer, Path(source).expanduser())
    tokens = torch.cat(windows) if windows else torch.empty(0, dtype=torch.int64)
    refuse_unknown_tokens(tokens, tokenizer, checkpoint)
    sequences = min(len(tokens) // SEQUENCE_TOKENS, SEQUENCES)
    whole = tokens[: sequences * SEQUENCE_TOKENS].view(-1, SEQUENCE_TOKENS)
    if not len(whole):
        raise UserError(f"{source} has {len(tokens)} tokens; calibration needs at least {SEQUENCE_TOKENS}")
    shape = (len(whole), SEQUENCE_TOKENS)
    return CalibrationText(calibration_name(source), shape, whole, {"sha256": digest, "shape": list(shape)})


def _windows(tokenizer: Any, texts: Iterable[str]) -> list[Tensor]:
    return token_windows(tokenizer, texts, SEQUENCE_TOKENS, SEQUENCES * (SEQUENCE_TOKENS - 1))


def _file_windows(tokenizer: Any, path: Path) -> tuple[list[Tensor], str]:
    """Return the file's tokens, and the sha256 of the whole file."""
    try:
        return _windows(tokenizer, read_texts(path)), hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise UserError(f"cannot read the calibration text {path}: {error.strerror}") from error
    except ValueError as error:
        raise UserError(
            f"{path} is not a text: {error}; give plain UTF-8, "
            'or a .jsonl file with one {"text": ...} a line'
        ) from error


@dataclass(frozen=True)
class _HubTexts:
    """A column of a data set on the Hub, as `HUB_FORM` names it."""

    dataset: str
    configuration: str | None
    revision: str | None
    split: str
    column: str

    @classmethod
    def of(cls, source: str) -> "_HubTexts":
        """Return the data set that `source` names. Raise UserError if `source` is not of the form
        `HUB_FORM`.
        """
        name, *parts = source.removeprefix(HUB).split(":")
        name, at, revision = name.partition("@")
        owner, *more = name.split("/", 2)
        dataset, configuration = "/".join([owner, *more[:1]]), more[1] if len(more) > 1 else None
        named = [owner, *more, *([revision] if at else [])]
        if not all(named) or len(parts) > 2:
            raise UserError(f"{source!r} is not the name of a data set on the Hub; write it as {HUB_FORM}")
        split, column = [*parts, "", ""][:2]
        return cls(dataset, configuration, revision or None, split or "train", column or "text")

    def texts(self) -> Iterator[str]:
        """Yield the column's texts, streamed; errors of the Hub, the network and the data set's format are
        raised."""
        datasets = importlib.import_module("datasets")
        for row in datasets.load_dataset(
            self.dataset, self.configuration, split=self.split, revision=self.revision, streaming=True
        ):
            yield row[self.column]


def _dataset_texts(source: str) -> Iterator[str]:
    """Yield the texts of a data set on the Hub. A UserError says why the texts cannot be read."""
    named = _HubTexts.of(source)
    try:
        importlib.import_module("datasets")
    except ImportError as error:
        raise UserError(
            "a calibration text from the Hub needs the package `datasets`: pip install 'scalegate[datasets]'"
        ) from error
    try:
        yield from named.texts()
    except Exception as error:
        raise UserError(
            f"cannot read the calibration text {source}: {error}; a data set on the Hub is written as "
            f"{HUB_FORM}"
        ) from error
