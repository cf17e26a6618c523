"""One validation with its arguments, and the command that repeats it."""

import contextlib
import shlex
from dataclasses import dataclass, replace
from pathlib import Path

from ...base.errors import UserError
from ...base.log import logger
from ...base.option_fields import values_of, words_of
from ...base.stage_clock import StageClock, in_words
from ...serving_check.adapters.all_engines import engine_named
from ...serving_check.adapters.placement import Placement
from ...serving_check.engine.options import EngineOptions
from ...serving_check.gate.policy import declared_by, first_lines, weaker_settings
from ...serving_check.gate.record import parse_verdict
from ...serving_check.settings import Bounds, WorkloadSettings
from ...serving_check.statistics.decide import LOOKS
from ..checkpoints.checkpoint import Checkpoint
from ..conventions.kv_cache import kv_cache_of
from ..records.artifact import VERDICT_NAME, Artifact
from .options import ValidateOptions
from .servers import IN_PROCESS, artifact_options, baseline_options, longest_request
from .task_scores import public_tasks


@dataclass(frozen=True)
class LoadOptions:
    """How both models are loaded; `layout` and `kv_cache_dtype` apply to the artifact alone."""

    engine: EngineOptions
    """The engine's options, with `auto` replaced by a device."""
    baseline_dtype: str
    progress: bool


@dataclass(frozen=True)
class Run:
    """One call of `validate`, its arguments checked and its defaults filled in."""

    artifact: Checkpoint
    baseline: Checkpoint
    rival: Checkpoint | None
    manifest: Artifact | None
    """The artifact's manifest; None for a checkpoint that Scalegate did not make."""
    workload: WorkloadSettings
    bounds: Bounds
    asked: ValidateOptions
    options: EngineOptions
    """The engine's options for the artifact."""
    placement: Placement
    baseline_dtype: str
    progress: bool
    clock: StageClock

    @property
    def served_options(self) -> EngineOptions:
        """Return the options of the artifact's server."""
        return artifact_options(self.options, self.manifest)

    @property
    def baseline_options(self) -> EngineOptions:
        return replace(baseline_options(self.options), dtype=self.baseline_dtype)

    @property
    def checkpoints(self) -> list[Checkpoint]:
        sides = self.artifact, self.baseline, self.rival
        return [checkpoint for checkpoint in sides if checkpoint is not None]

    @property
    def declared(self) -> dict[str, float]:
        return declared_by(self.manifest.recipe if self.manifest else {})

    @property
    def public_tasks(self) -> str | None:
        return public_tasks(self.asked.tasks)

    @property
    def text_name(self) -> str | None:
        """Return the name of the held-out text, if one was given."""
        return None if self.asked.text is None else self.asked.text.name

    @property
    def in_process(self) -> LoadOptions:
        return LoadOptions(self.options, self.baseline_dtype, self.progress)

    @property
    def command(self) -> str:
        """Return the command that repeats this run; every setting is spelled out, so that no default can
        change it.

        The command is published with the verdict, so it has folders and files by name only.
        """
        public = replace(
            self.asked,
            baseline=self.baseline.public_name,
            baseline_revision=self.baseline.revision,
            baseline_engine=self.asked.engine_of_baseline,
            text=None if self.text_name is None else Path(self.text_name),
            rival=None if self.rival is None else self.rival.public_name,
            rival_revision=None if self.rival is None else self.rival.revision,
            tasks=self.public_tasks,
            sign=None,
        )
        engines = engine_named(public.engine), engine_named(self.asked.engine_of_baseline)
        reach = engines[0].options | engines[1].options | IN_PROCESS
        every = self.options.to_json() | self.placement.asked_for()
        spelled_out = [
            {"revision": self.artifact.revision},
            values_of(public),
            values_of(self.workload),
            values_of(self.bounds),
            {name: value for name, value in every.items() if name in reach},
        ]
        words = [word for values in spelled_out for word in words_of(values)]
        return shlex.join(["pipeline", "validate", self.artifact.public_name, *words])


def require_context(checkpoint: Checkpoint, workload: WorkloadSettings) -> None:
    """Raise UserError if the model's context is shorter than the workload's requests."""
    context, needed = checkpoint.context, longest_request(workload)
    if context is not None and needed > context:
        raise UserError(
            f"requests of {workload.input_len} + {workload.output_len} tokens (at least {needed}) do not fit "
            f"the {context} tokens of {checkpoint.source}'s context; lower --input-len or --output-len"
        )


def weaker_than_policy(run: Run) -> list[str]:
    """Return why the result cannot be published, as far as that is known before anything is measured."""
    kv_cache_dtype = kv_cache_of(run.artifact, run.options.kv_cache_dtype).kv_format
    return weaker_settings(run.workload, run.bounds, run.asked.quality_tokens, run.declared, kv_cache_dtype)


def say_exploratory(run: Run) -> None:
    """Warn, before hours of work, that the result will not be published; without a manifest there is no
    warning, since then nothing is to be published.
    """
    for line in first_lines(weaker_than_policy(run), {}) if run.manifest and run.progress else []:
        logger.warning(line)


def outlook(run: Run) -> str:
    """Return the steps of the run, before any of the steps has begun."""
    workload = run.workload
    least = sum(workload.measured_ms) * workload.waves * LOOKS[0]
    text = (
        f"{run.artifact.public_name} against {run.baseline.public_name} in {run.baseline_dtype}: at least "
        f"{least} requests of up to {workload.input_len} + {workload.output_len} tokens to either server"
    )
    path = run.artifact.folder / VERDICT_NAME
    if run.manifest is not None and path.is_file():
        with contextlib.suppress(UserError):
            text += f"; its last verdict took {in_words(parse_verdict(path).duration_seconds)}"
    return text
