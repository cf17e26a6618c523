"""Scores of evaluation tasks, artifact and baseline: a verdict contains them, and no check judges them."""

from dataclasses import dataclass

from ..settings import DOCUMENTED


@dataclass(frozen=True)
class TaskScore:
    """One metric of one lm-eval task, on both servers."""

    __pydantic_config__ = DOCUMENTED

    task: str
    metric: str
    """The metric's name in lm-eval, such as `acc_norm`; its filter after a comma, unless that is `none`."""
    value: float
    stderr: float | None
    """The standard error; null if lm-eval gives none."""
    baseline_value: float
    baseline_stderr: float | None
    higher_is_better: bool | None
    """Whether higher scores are better; null if lm-eval does not say."""
    samples: int | None
    """Number of examples that the score is the mean of."""
    shots: int | None
    """Number of examples in each prompt."""
    version: str
    """The version of the task."""
