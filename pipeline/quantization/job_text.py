"""Reading a job's text: its sequences, a word where it does not fit the model, and what is found on it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click
from torch import Tensor

from ..checkpoints.checkpoint import Checkpoint
from ..model_loader.skeleton import model_config
from .calibration import calibrate
from .calibration_text import CalibrationText
from .linear_weights import EMBEDDING
from .self_calibration import drawn_sequences
from .shared_tensors import Shared
from .tasks import WeightTask
from .text_fit import misfit, nats_on
from .wanted_of_text import Found, Wanted
from .weight_tensors import WeightQuantizer

DRAWN_NAME = "drawn.safetensors"


@dataclass(frozen=True)
class Reading:
    """Where a text is read, and by which model; folder: keeps what was found, for a job taken up again."""

    checkpoint: Checkpoint
    quantizer: WeightQuantizer
    folder: Path
    progress: bool

    def say(self, text: str) -> None:
        if self.progress:
            click.echo(text, err=True)


def sequences_of(text: CalibrationText | None, wanted: Wanted, reading: Reading) -> Tensor | None:
    """The text in tokens, int64 [S, T], drawn now where the model writes it; None where there is none."""
    if text is None:
        return None
    device = reading.quantizer.device
    if text.sequences is None:
        kept = reading.folder / DRAWN_NAME
        return drawn_sequences(reading.checkpoint, text.shape, device, kept, reading.progress)
    if wanted.solved and not reading.folder.is_dir():
        vocabulary = model_config(reading.checkpoint).get_text_config().vocab_size
        said = misfit(nats_on(reading.checkpoint, text.sequences, device), vocabulary)
        if said is not None:
            reading.say(said)
    return text.sequences


def found_on(
    sequences: Tensor | None, tasks: Sequence[WeightTask], wanted: Wanted, shared: Shared, reading: Reading
) -> Found:
    """What the quantizers of `tasks` want of the text; nothing is read where they want nothing."""
    if sequences is None or not wanted:
        return Found()
    linears = [task.linear for task in tasks if task.linear is not None and task.is_quantized]
    found = calibrate(
        reading.checkpoint,
        [one for one in linears if one.role != EMBEDDING],
        wanted,
        sequences,
        reading.quantizer,
        shared,
        reading.folder,
        reading.progress,
    )
    if found.scarce:
        reading.say(
            f"{len(found.scarce)} experts get fewer tokens of the text than they have inputs, such as "
            f"{found.scarce[0]}; they were rounded with their whole layer's inputs in view"
        )
    return found
