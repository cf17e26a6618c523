"""The zoo's gate: two real servers, one of which can be made faulty, and both models to judge by.

`conftest.py` makes a fixture of it for the tests, and `each_fault.py` runs each fault by itself.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from scalegate.base.stage_clock import StageClock
from scalegate.pipeline.checkpoints.checkpoint import open_checkpoint
from scalegate.pipeline.validation.held_out import HeldOutText
from scalegate.pipeline.validation.in_process import (
    InProcessFigures,
    TextScorer,
    figures_of,
    load_models,
    scorer_of,
)
from scalegate.pipeline.validation.known_text import read_known
from scalegate.pipeline.validation.run import LoadOptions
from scalegate.pipeline.validation.servers import server_of, sized_options
from scalegate.serving_check.adapters import Endpoint, SubprocessEndpoint
from scalegate.serving_check.adapters.engine import ServerJob
from scalegate.serving_check.checks.canary import scored
from scalegate.serving_check.checks.in_use.sampling import NAME as SAMPLING
from scalegate.serving_check.evidence.artifact_figures import TextFigures
from scalegate.serving_check.evidence.curve import curve_of
from scalegate.serving_check.evidence.evidence import Evidence
from scalegate.serving_check.evidence.in_use import FiguresInUse
from scalegate.serving_check.gate.gate import GateRun, RunFigures, serve_and_measure
from scalegate.serving_check.gate.in_use import RequestSource
from scalegate.serving_check.gate.judge import Judgement, judge
from scalegate.serving_check.settings import Bounds, WorkloadSettings

from .server_fault import Fault, M

FAULTY_SERVER = Path(__file__).with_name("faulty_server.py")
WORKLOAD = WorkloadSettings(ms=(1, M), input_len=24, output_len=32, max_blocks=20, seed=1)
SHORT_WORKLOAD = replace(WORKLOAD, output_len=16)
"""Enough for the faults that the suite has."""
LONG_WORKLOAD = replace(WORKLOAD, ms=(1, 2, 4, M, 2 * M), output_len=64, max_blocks=96)
IN_USE = replace(WORKLOAD, draws_between=True)
MANY_IN_USE = replace(IN_USE, ms=(1, 4 * M))
"""With as many sampled tokens as the release policy's load has: they tell a temperature that is 10% off."""
LONG_PROMPTS = replace(WORKLOAD, input_len=1100, decoding_apart=True, max_blocks=48)
"""A quiet machine needs ten blocks; where consecutive ones are correlated, many more."""
OPTIONS = sized_options({"device": "cpu", "max_num_seqs": 4 * M}, LONG_PROMPTS)
assert OPTIONS.max_model_len is not None
CONTEXT = OPTIONS.max_model_len
"""Tokens of a request, at most."""
BEFORE_S = 240.0
"""Seconds of a verdict that the zoo's gate does without, such as the starts of servers: a profile of loads
gets its time by what a verdict has taken."""
# The zoo is of faults that no noise hides; seven percent on a busy machine is the gate's own bench's affair.
BOUNDS = replace(Bounds(), throughput_floor=0.5)
# With AMX the sound artifact reads prompts 1.4 times as fast as its baseline: four times slower is then .4,
# and on a busier machine nearly .5, which the limits of four blocks cannot tell from that floor.
PROFILE_BOUNDS = replace(BOUNDS, throughput_floor=0.8)


@dataclass(frozen=True)
class Zoo:
    """Both servers are up, and sound until a fault is switched on."""

    artifact: Endpoint
    baseline: Endpoint
    fault_file: Path
    text: HeldOutText
    figures: InProcessFigures
    score: TextScorer

    def judged(
        self,
        fault: str = "",
        artifact: Endpoint | None = None,
        workload: WorkloadSettings = WORKLOAD,
        in_use: bool = False,
        bounds: Bounds = BOUNDS,
    ) -> Judgement:
        """The real gate on the artifact's server with this fault, or on another server in its place.

        in_use: send a load as in use as well
        """
        source = RequestSource(CONTEXT, self.text.end_token, self.text.conversations)
        self.fault_file.write_text(fault)
        try:
            served = serve_and_measure(
                artifact or self.artifact,
                self.baseline,
                GateRun(
                    workload,
                    bounds,
                    self.text.token_ids,
                    self.text.token_text,
                    StageClock(shown=False, _started=time.monotonic() - BEFORE_S),
                    source=source if in_use else None,
                ),
            )
        finally:
            self.fault_file.write_text("")
        evidence = Evidence(
            loaded=self.figures.loaded,
            baseline_loaded=self.figures.baseline_loaded,
            quality=self.figures.comparison,
            weights=None,
            texts=TextFigures(),
            canary=scored(served.canary, self.score.baseline_nats),
            baseline_canary=scored(served.baseline_canary, self.score.baseline_nats),
            measured=tuple(served.measured),
            capacity=served.capacity,
            limit=served.limit,
            compiled=served.compiled,
            packed=served.packed,
            answers=self.score.texts(served.texts),
            repeated=served.repeated,
            together=served.together,
            in_use=scored_in_use(served, self.score),
            at_rest=served.at_rest,
            diagnoses={point.m: "" for point in curve_of(served.measured, workload, bounds)},
        )
        return judge(evidence, workload, bounds)


def scored_in_use(served: RunFigures, score: TextScorer) -> FiguresInUse | None:
    if served.in_use is None:
        return None
    return replace(served.in_use.figures, answers=score.answers_in_use(served.in_use.answers))


@contextmanager
def zoo_of(artifact_folder: Path, checkpoint: Path, folder: Path) -> Iterator[Zoo]:
    """Start both servers, and load both models.

    folder: for the servers' logs
    """
    fault_file = folder / "fault"
    fault_file.write_text("")
    embedded = server_of(
        ServerJob("embedded", "artifact", artifact_folder, OPTIONS, folder / "artifact.log", progress=False)
    )
    assert isinstance(embedded, SubprocessEndpoint)
    words = embedded.command[embedded.command.index("serve") + 1 :]
    command = [sys.executable, "-P", str(FAULTY_SERVER), str(fault_file), *words]
    faulty = SubprocessEndpoint(command, "the faulty server", log=folder / "faulty.log", progress=False)
    sound = server_of(
        ServerJob("embedded", "baseline", checkpoint, OPTIONS, folder / "baseline.log", progress=False)
    )
    with faulty as artifact, sound as baseline:
        ours, theirs = open_checkpoint(str(artifact_folder)), open_checkpoint(str(checkpoint))
        load = LoadOptions(OPTIONS, OPTIONS.dtype, progress=False)
        models = load_models(ours, theirs, load)
        text = read_known(models.theirs.model, ours, theirs, 2048)
        figures = figures_of(models, text, load)
        score = scorer_of(models, load, LONG_PROMPTS.input_len + LONG_WORKLOAD.output_len)
        yield Zoo(artifact, baseline, fault_file, text, figures, score)


def workload_for(fault: Fault) -> WorkloadSettings:
    if fault.profile is not None:
        return replace(IN_USE, profile=fault.profile)
    if fault.in_use:
        return MANY_IN_USE if fault.check == SAMPLING else IN_USE
    if fault.long_prompts:
        return LONG_PROMPTS
    return LONG_WORKLOAD if fault.rare else SHORT_WORKLOAD if fault.quick else WORKLOAD


def judged_with(zoo: Zoo, fault: Fault, run: int) -> Judgement:
    """The real gate on the artifact's server with this fault, under the load that shows it."""
    # What is rare may not happen in the seconds that a curve takes on a fast machine.
    in_use = fault.in_use or fault.rare
    bounds = BOUNDS if fault.profile is None else PROFILE_BOUNDS
    workload = replace(workload_for(fault), seed=2 + run)
    return zoo.judged(fault.name, workload=workload, in_use=in_use, bounds=bounds)


def not_passed(judgement: Judgement) -> dict[str, str]:
    return {check.name: check.reason for check in judgement.checks if check.status not in ("pass", "unknown")}


def measured(judgement: Judgement, name: str) -> str:
    return next(check.measured for check in judgement.checks if check.name == name)


def is_named(fault: Fault, judgement: Judgement) -> bool:
    """Whether the check that the fault is for has not passed, in the words that name it."""
    reason = not_passed(judgement).get(fault.check)
    return reason is not None and (fault.words in reason or fault.words in measured(judgement, fault.check))
