"""Reading a job's text: its sequences, the model's own beside them, and what is found on both.

Where a text is given, and weights are solved on it, every other sequence is drawn from the model: GPTQ on a
text of another kind is worse than none, and on both it is as good as on the right one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from ...base.atomic_files import write_json
from ...base.log import logger
from ...base.untrusted_files import read_json_object
from ..checkpoints.checkpoint import Checkpoint
from ..model_loader.linear_weights import EMBEDDING
from ..model_loader.skeleton import model_config
from .calibration.calibration import calibrate
from .calibration.calibration_names import LEARNED, SCARCE
from .calibration.calibration_text import SEQUENCES, CalibrationText
from .calibration.self_calibration import beside, can_draw, drawn_sequences
from .calibration.text_fit import TextFit, measure_fit
from .calibration.wanted_of_text import Found, Wanted
from .shards.shared_tensors import Shared
from .shards.tasks import WeightTask
from .shards.weight_tensors import WeightQuantizer

DRAWN_NAME, FIT_NAME = "drawn.safetensors", "fit.json"
UNLEARNED_SEQUENCES = SEQUENCES // 2
"""Read where no rounding is learned: INT4 of the 5M checkpoint has a KL of 0.0198 with so many, and with
twice as many."""
ALONE = (
    "the model does not fit into memory and writes nothing to be read beside the calibration text: a text of "
    "another kind than the model is used on can do harm"
)


UNLEARNED = (
    "no rounding was learned: that needs two sequences of the text at least, one to be held aside; weights "
    "are as the recipe's method left them"
)


@dataclass(frozen=True)
class Reading:
    """Where a text is read, and by which model; folder: keeps what was found, for a job taken up again."""

    checkpoint: Checkpoint
    quantizer: WeightQuantizer
    folder: Path
    progress: bool

    def say(self, text: str) -> None:
        if self.progress:
            logger.warning(text)


@dataclass(frozen=True)
class TextRead:
    """sequences: int64 [S, T]; facts: what the manifest says of them"""

    sequences: Tensor
    facts: dict[str, Any]


def read_text(text: CalibrationText | None, wanted: Wanted, reading: Reading) -> TextRead | None:
    """The text, and what the model writes in its place or beside it; None where there is none.

    What was drawn and measured is kept, so that a job taken up again reads the same.
    """
    if text is None:
        return None
    checkpoint, device = reading.checkpoint, reading.quantizer.device
    drawn = partial(drawn_sequences, checkpoint, device=device, progress=reading.progress)
    kept = reading.folder / DRAWN_NAME
    most = SEQUENCES if wanted.learning_steps else UNLEARNED_SEQUENCES
    count, tokens = text.shape
    if text.sequences is None:
        sequences = drawn((min(count, most), tokens), kept=kept)
        return TextRead(sequences, {"text": 0, "own": len(sequences)})
    if not wanted.solved:
        return TextRead(text.sequences, {"text": len(text.sequences), "own": 0})
    count = min(count, most // 2)
    found = reading.folder / FIT_NAME
    fit = TextFit.from_json(read_json_object(found)) if found.is_file() else None
    draws = can_draw(checkpoint, device) if fit is None else fit.own is not None
    own = drawn((count, tokens), kept=kept) if draws else None
    if fit is None:
        vocabulary = model_config(checkpoint).get_text_config().vocab_size
        fit = measure_fit(checkpoint, text.sequences, own, vocabulary, device)
        reading.folder.mkdir(exist_ok=True)
        write_json(found, fit.to_json())
    for said in (fit.said, None if draws else ALONE):
        if said is not None:
            reading.say(said)
    sequences = text.sequences if own is None else beside(text.sequences, own)
    written = 0 if own is None else len(own)
    facts = {"text": len(sequences) - written, "own": written, **fit.to_json()}
    return TextRead(sequences, facts)


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
    if wanted.learning_steps and len(sequences) < 2:
        reading.say(UNLEARNED)
    return found


def facts_of(found: Found, wanted: Wanted) -> dict[str, Any]:
    """What the manifest says of what was found on the text."""
    learned = {layer: {"before": one[0], "after": one[1]} for layer, one in found.learned.items()}
    return ({LEARNED: learned} if wanted.learning_steps else {}) | (
        {SCARCE: found.scarce} if found.scarce else {}
    )
