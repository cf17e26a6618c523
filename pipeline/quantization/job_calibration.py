"""A job's calibration: the sequences that are read, and the pass over them.

If a text is given and weights are rounded on it, every other sequence is self-generated: GPTQ on a text of
another kind is worse than no calibration, but on both texts it is as good as on the right text.
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
from .calibration.calibration_needs import CalibrationNeeds
from .calibration.calibration_result import CalibrationResult
from .calibration.calibration_text import SEQUENCES, CalibrationText
from .calibration.self_calibration import beside, can_draw, sample_sequences
from .calibration.text_fit import TextFit, measure_fit
from .shards.shared_tensors import Shared
from .shards.tasks import WeightTask
from .shards.weight_tensors import WeightQuantizer

DRAWN_NAME, FIT_NAME = "drawn.safetensors", "fit.json"
UNLEARNED_SEQUENCES = SEQUENCES // 2
"""How many sequences are read if no rounding is learned: INT4 of the 5M checkpoint has a KL of 0.0198 with
this number, and the same with twice as many."""
ALONE = (
    "the model does not fit into memory, so nothing that it writes is read beside the calibration text; a "
    "text unlike those that the model is used on can do harm"
)
UNLEARNED = (
    "no rounding was learned, for the text has only one sequence and one is held aside; weights are as the "
    "recipe's method left them"
)


@dataclass(frozen=True)
class CalibrationContext:
    """The model that reads the text, and the folder that keeps results for a resumed job."""

    checkpoint: Checkpoint
    quantizer: WeightQuantizer
    folder: Path
    progress: bool

    def say(self, text: str) -> None:
        if self.progress:
            logger.warning(text)


@dataclass(frozen=True)
class CalibrationSequences:
    """The sequences to calibrate on, int64 [S, T]. facts: the manifest's record of the sequences"""

    sequences: Tensor
    facts: dict[str, Any]


def calibration_sequences(
    text: CalibrationText | None, needs: CalibrationNeeds, context: CalibrationContext
) -> CalibrationSequences | None:
    """Return the text's sequences, the model's own, or both in turn; None without a text.

    The model's sequences and the text's fit are kept, so that a resumed job reads the same sequences.
    """
    if text is None:
        return None
    checkpoint, device = context.checkpoint, context.quantizer.device
    sample = partial(sample_sequences, checkpoint, device=device, progress=context.progress)
    kept = context.folder / DRAWN_NAME
    most = SEQUENCES if needs.learning_steps else UNLEARNED_SEQUENCES
    count, tokens = text.shape
    if text.sequences is None:
        sequences = sample((min(count, most), tokens), kept=kept)
        return CalibrationSequences(sequences, {"text": 0, "own": len(sequences)})
    if not needs.solved:
        return CalibrationSequences(text.sequences, {"text": len(text.sequences), "own": 0})
    fit_file = context.folder / FIT_NAME
    fit = TextFit.from_json(read_json_object(fit_file)) if fit_file.is_file() else None
    draws = can_draw(checkpoint, device) if fit is None else fit.own is not None
    own = sample((min(count, most // 2), tokens), kept=kept) if draws else None
    if fit is None:
        vocabulary = model_config(checkpoint).get_text_config().vocab_size
        fit = measure_fit(checkpoint, text.sequences, own, vocabulary, device)
        context.folder.mkdir(exist_ok=True)
        write_json(fit_file, fit.to_json())
    for notice in (fit.notice, None if draws else ALONE):
        if notice is not None:
            context.say(notice)
    sequences = text.sequences if own is None else beside(text.sequences, own)
    own_count = 0 if own is None else len(own)
    facts = {"text": len(sequences) - own_count, "own": own_count, **fit.to_json()}
    return CalibrationSequences(sequences, facts)


def calibration_result(
    sequences: Tensor | None,
    tasks: Sequence[WeightTask],
    needs: CalibrationNeeds,
    shared: Shared,
    context: CalibrationContext,
) -> CalibrationResult:
    """Return the calibration data that the quantizers of `tasks` need; the text is not read if they need
    none.
    """
    if sequences is None or not needs:
        return CalibrationResult()
    linears = [task.linear for task in tasks if task.linear is not None and task.is_quantized]
    result = calibrate(
        context.checkpoint,
        [linear for linear in linears if linear.role != EMBEDDING],
        needs,
        sequences,
        context.quantizer,
        shared,
        context.folder,
        context.progress,
    )
    if result.scarce:
        context.say(
            f"{len(result.scarce)} experts, such as {result.scarce[0]}, get fewer tokens of the text than "
            "they have inputs; they were rounded on the inputs of their whole layer"
        )
    if needs.learning_steps and len(sequences) < 2:
        context.say(UNLEARNED)
    return result


def calibration_facts(result: CalibrationResult, needs: CalibrationNeeds) -> dict[str, Any]:
    """Return the manifest's record of the result."""
    learned = {layer: {"before": before, "after": after} for layer, (before, after) in result.learned.items()}
    return ({LEARNED: learned} if needs.learning_steps else {}) | (
        {SCARCE: result.scarce} if result.scarce else {}
    )
