"""Scores of evaluation tasks, artifact and baseline: a verdict contains them, and no check judges them."""

from dataclasses import dataclass

from ..settings import DOCUMENTED


@dataclass(frozen=True)
class TaskScore:
    """One metric of one lm-eval task, on both servers."""

    __pydantic_config__ = DOCUMENTED

    task: str
    metric: str
    """lm-eval's name of it, such as `acc_norm`; its filter after a comma, unless that is `none`."""
    value: float
    stderr: float | None
    """Standard error; null where lm-eval gives none."""
    baseline_value: float
    baseline_stderr: float | None
    higher_is_better: bool | None
    """Null where lm-eval does not say."""
    samples: int | None
    """Examples that it is the mean of."""
    shots: int | None
    """Examples in each prompt."""
    version: str
    """Of the task."""
