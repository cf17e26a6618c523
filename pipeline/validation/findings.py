"""The parts of a verdict measured in this process: quality, the files, and the likelihood of the servers'
answers.

This module imports the libraries of models, which takes seconds: `measure.py` imports it while the servers
start.
"""

from dataclasses import dataclass, replace

from ...serving_check.checks.canary import scored
from ...serving_check.engine.options import UNQUANTIZED
from ...serving_check.evidence.artifact_figures import ReaderFigures, TextFigures, WeightFigures
from ...serving_check.evidence.evidence import ScoredText, TextScore
from ...serving_check.evidence.in_use import AnswerInUse
from ...serving_check.gate.gate import CANARY_LENGTH, CANARY_PROMPT, RunFigures
from ..conventions.kv_cache import kv_cache_of
from .also_load import read_elsewhere
from .by_layers import figures_by_layers, needs_layers, scorer_by_layers, within_padding
from .given_text import read_given, require_doubt
from .held_out import HeldOutText, read_held_out, window_for
from .in_process import (
    InProcessFigures,
    Models,
    figures_of,
    load_models,
    release_memory,
    scorer_of,
)
from .known_text import read_known
from .other_readers import misreadings
from .run import Run
from .text_files import compare_text_files
from .weights import compare_weights


@dataclass(frozen=True)
class Findings:
    """The measurements that need no server."""

    text: HeldOutText
    """Scalegate's held-out text. Prompts are cut from it and from the user's own text."""
    given: HeldOutText | None
    figures: InProcessFigures
    weights: WeightFigures | None
    texts: TextFigures
    readers: ReaderFigures
    models: Models | None
    """Both models, if they were kept in memory; else None."""


@dataclass(frozen=True)
class Scores:
    """The servers' answers, compared with both models."""

    canary: tuple[ScoredText, ...]
    baseline_canary: tuple[ScoredText, ...]
    answers: tuple[TextScore, ...]
    in_use: tuple[AnswerInUse, ...] = ()
    """The scored answers of a load as in use."""


def look(run: Run, keep_models: bool) -> Findings:
    """Measure quality, then look at the files.

    keep_models: whether there is memory for the models beside the servers
    """
    kv_format = kv_cache_of(run.artifact, run.options.kv_cache_dtype).kv_format
    window = window_for(run.artifact, run.baseline, kv_format, run.asked.quality_tokens)
    how = run.artifact, run.baseline, run.asked.quality_tokens, window, run.workload.input_len
    given = None if run.asked.text is None else read_given(run.asked.text, *how)
    with run.clock.stage("loading"):
        models = None if needs_layers(run) else load_models(run.artifact, run.baseline, run.in_process)
    text = read_held_out(None, *how) if models is None else read_known(models.theirs.model, *how)
    if given is not None:
        text = replace(text, token_ids=[*text.token_ids, *given.token_ids])
    # Before quality, which stores keys and values as they are served and so changes the model.
    with run.clock.stage("other readers"):
        readers = _other_readers(run, text, models)
    with run.clock.stage("quality"):
        if models is None:
            run.clock.say("both models together do not fit in memory here: quality a layer at a time")
            figures, text = figures_by_layers(run, text, given)
        else:
            figures = figures_of(models, text, run.in_process, given)
    if run.asked.text is not None and figures.given is not None:
        require_doubt(run.asked.text, figures.given)
    if not keep_models:
        models = None
        release_memory()
    with run.clock.stage("files"):
        return Findings(text, given, figures, *_look_at_files(run), readers, models)


def score(run: Run, findings: Findings, served: RunFigures) -> Scores:
    """Score the servers' answers with the models that were kept in memory, or load the models again, since
    the servers have ended by then.
    """
    in_use = served.in_use.answers if served.in_use else ()
    longest = max(
        run.workload.input_len + run.workload.output_len,
        CANARY_PROMPT + CANARY_LENGTH,
        *(answer.context for answer in in_use),
    )
    with run.clock.stage("answers"):
        if findings.figures.by_layers:
            in_use = within_padding(in_use)
            scorer = scorer_by_layers(run, served, in_use)
        else:
            models = findings.models or load_models(run.artifact, run.baseline, run.in_process)
            scorer = scorer_of(models, run.in_process, longest)
        return Scores(
            scored(served.canary, scorer.baseline_nats),
            scored(served.baseline_canary, scorer.baseline_nats),
            scorer.texts(served.texts),
            scorer.answers_in_use(in_use),
        )


def _other_readers(run: Run, text: HeldOutText, models: Models | None) -> ReaderFigures:
    """Return how other readers read the files: checked on the files and, if the models are in memory, by
    other readers' logits.
    """
    elsewhere = read_elsewhere(run, None if models is None else models.ours.model, text.windows[0])
    return ReaderFigures(misreadings(run.artifact), elsewhere)


def _look_at_files(run: Run) -> tuple[WeightFigures | None, TextFigures]:
    kv_cache = kv_cache_of(run.artifact, run.options.kv_cache_dtype)
    compared = compare_weights(
        run.artifact,
        run.baseline,
        run.manifest,
        has_kv_format=kv_cache.kv_format != UNQUANTIZED,
        device=run.options.device,
        progress=run.progress,
    )
    weights = None if compared is None else compared.figures
    declared = run.manifest.declared_changes() if run.manifest else ()
    return weights, TextFigures(compare_text_files(run.artifact, run.baseline), declared)
