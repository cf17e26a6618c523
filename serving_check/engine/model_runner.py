"""What a model runner is: an object that runs the model on the batches of a step and draws their tokens.

The scheduler chooses the batches. `cpu_runner.py` is the plain runner, `cuda_runner.py` the one for GPUs.
"""

from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor
from transformers import PreTrainedModel

from .scheduler import PrefillChunk, Schedule
from .sequence import Sequence
from .step_clock import StepClock


@dataclass(frozen=True)
class StepResult:
    """A batch's next tokens; valid until the next batch runs."""

    sequences: list[Sequence]
    """The S sequences for which a token is drawn."""
    logits: Tensor
    """The logits [S, V]."""
    drawn: Tensor
    """The drawn tokens, int64 [S]."""
    scored: list[tuple[PrefillChunk, Tensor]] = field(default_factory=list)
    """Prefill chunks with prompt logprobs, each with the logits of its scored positions."""


class ModelRunner(Protocol):
    """The model, the storage of its attention, and the state that stays on the device between steps."""

    model: PreTrainedModel
    clock: StepClock

    def batches(self, schedule: Schedule) -> list[Schedule]:
        """Return the batches of a step: one mixed batch, or several that run one after another."""

    def run(self, batch: Schedule) -> StepResult:
        """Launch one batch. The call does not change the sequences."""

    def warm_up_tokens(self) -> list[int]:
        """Return the sizes in tokens for which the engine must call `warm_up`."""

    def warm_up(self, num_tokens: int) -> None:
        """Run a mixed batch of `num_tokens` tokens, all of them padding."""

    def warm_up_requests(self) -> list[int]:
        """Return the batch sizes of decode steps that must run once before the first request is served."""
