"""The servers of a validation: they are started together if they fit, else in turns, and stopped in any
case.
"""

import functools
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import torch

from ...base.errors import UserError
from ...serving_check.adapters import Endpoint
from ...serving_check.adapters.engine import Server, ServerJob
from ...serving_check.adapters.starting import restart, starting
from ...serving_check.adapters.subprocess_endpoint import SubprocessEndpoint
from ...serving_check.adapters.taking_turns import TakingTurns
from ...serving_check.checks.batch_invariance import NAME as BATCH_INVARIANCE
from ...serving_check.engine.options import EngineOptions
from ...serving_check.evidence.company import CompanyFigures, compare_in_company
from ...serving_check.evidence.task_scores import TaskScore
from ...serving_check.gate.gate import GateRun, RunFigures, serve_and_measure, serve_in_turns
from ...serving_check.gate.in_use import RequestSource
from ...serving_check.gate.interleaving import Rival
from ...serving_check.gate.turns import require_groups
from ..checkpoints.checkpoint import Checkpoint
from ..machine.cores import model_threads, threads_alone
from .gpu_memory import MemoryPlan, Side, plan_memory
from .run import Run, weaker_than_policy
from .servers import baseline_options, has_room, may_start_at_once, server_of, sides_of
from .task_scores import CONTEXT, evaluate, paired_scores

if TYPE_CHECKING:
    from .held_out import HeldOutText

LONGEST = 2048
"""The longest request in tokens if no config states the model's context."""


class HasText(Protocol):
    """The part of findings that is needed here: the text that prompts are cut from."""

    @property
    def text(self) -> "HeldOutText": ...


FindingsT = TypeVar("FindingsT", bound=HasText)
ScoresT = TypeVar("ScoresT")
Look = Callable[[bool], FindingsT]
"""Measures what needs no server; it is told whether the models may stay in memory beside the servers."""
Score = Callable[[FindingsT, RunFigures], ScoresT]
"""Compares the servers' answers with the models."""


@dataclass(frozen=True)
class Results(Generic[FindingsT, ScoresT]):
    findings: FindingsT
    served: RunFigures
    task_scores: tuple[TaskScore, ...]
    scores: ScoresT


@dataclass(frozen=True)
class _ServerGroup:
    sides: Sequence[Side]
    plan: MemoryPlan
    servers: Sequence[Server]
    """The servers, in the order of the sides."""

    @property
    def started(self) -> list[SubprocessEndpoint]:
        """Return the endpoints that were started here."""
        return [server for server in self.servers if isinstance(server, SubprocessEndpoint)]

    @property
    def can_restart(self) -> bool:
        started = self.started
        return len(started) == len(self.servers) and all(server.keeps_address for server in started)


def serve_sides(
    run: Run, look: Look[FindingsT], score: Score[FindingsT, ScoresT]
) -> Results[FindingsT, ScoresT]:
    """Measure all servers side by side, or in turns if they do not fit together.

    `look` runs while the servers start if memory allows it, else before. `score` runs while they stop, or
    after that.

    Raise UserError if something else ended a server.
    """
    sides = sides_of(_sides_without_places(run), run.placement)
    is_roomy = has_room(sides)
    findings = None if is_roomy else look(False)
    # Only now: what was loaded here is gone from the GPU.
    plan = plan_memory(sides, run.placement)
    logs = Path(tempfile.mkdtemp(prefix="scalegate-logs-"))
    servers = _ServerGroup(sides, plan, _servers(run, sides, plan, logs))
    scores = None
    if plan.together:
        findings, served, task_scores, scores = _together(run, servers, is_roomy, findings, look, score)
    else:
        if not servers.can_restart:
            raise UserError(
                "the servers do not fit on the GPU together, and cannot be started in turns here: "
                f"{plan.in_turns_because}"
            )
        require_groups(run.workload)
        run.clock.say(
            f"the servers do not fit on the GPU together, so they take turns: {plan.in_turns_because}"
        )
        findings = look(False) if findings is None else findings
        served, task_scores = _in_turns(run, findings.text, servers)
    # Left behind where a server failed: the error names the log.
    shutil.rmtree(logs)
    return Results(findings, served, task_scores, score(findings, served) if scores is None else scores)


def _sides_without_places(run: Run) -> list[tuple[str, str, Checkpoint, EngineOptions]]:
    """Return name, engine, checkpoint and options of each server."""
    sides = [
        ("artifact", run.asked.engine, run.artifact, run.served_options),
        ("baseline", run.asked.engine_of_baseline, run.baseline, run.baseline_options),
    ]
    if run.rival is not None:
        sides.append(("rival", run.asked.engine, run.rival, baseline_options(run.options)))
    return sides


def _servers(run: Run, sides: Sequence[Side], plan: MemoryPlan, logs: Path) -> list[Server]:
    return [
        server_of(
            ServerJob(
                side.engine,
                side.name,
                side.checkpoint.folder,
                side.options,
                logs / f"{side.name}.log",
                plan.grants[side.name],
                run.progress,
                run.placement,
                side.devices,
            )
        )
        for side in sides
    ]


def _together(
    run: Run,
    servers: _ServerGroup,
    is_roomy: bool,
    findings: FindingsT | None,
    look: Look[FindingsT],
    score: Score[FindingsT, ScoresT],
) -> tuple[FindingsT, RunFigures, tuple[TaskScore, ...], ScoresT | None]:
    """Measure with all servers up at the same time. Scores are None if there was no room to make them
    here.
    """
    at_once = is_roomy or may_start_at_once(servers.sides, servers.plan)
    started = servers.started
    scores = None
    with starting(servers.servers, together=at_once) as endpoints:
        if findings is None:
            with leaving_cores(len(started)):
                findings = look(True)
        with run.clock.stage("waiting for the servers"):
            artifact, baseline, *rivals = endpoints()
        served = serve_and_measure(
            artifact,
            baseline,
            _gate_run(run, findings.text),
            restart=functools.partial(restart, started, at_once) if servers.can_restart else None,
            rival=Rival(rivals[0], run.bounds.max_first_rival_m) if rivals else None,
        )
        served = replace(served, company=_in_company(run, artifact, findings.text))
        task_scores = _task_scores(run, {"artifact": artifact, "baseline": baseline}.__getitem__)
        _require_alive(started)
        if is_roomy:
            scores = _score_meanwhile(functools.partial(score, findings, served), started)
        up = run.clock.elapsed
    run.clock.add("stopping the servers", run.clock.elapsed - up)
    return findings, served, task_scores, scores


def _gate_run(run: Run, text: "HeldOutText") -> GateRun:
    gate_run = GateRun(run.workload, run.bounds, text.token_ids, text.token_text, run.clock)
    # What is exploratory is not published, and need not take longer than its curve, unless it asks for more.
    if weaker_than_policy(run) and run.workload.profile is None:
        return replace(gate_run, watched_s=0.0)
    gpus = () if torch.device(run.options.device).type == "cpu" else (run.placement.devices or (0,))
    return replace(gate_run, source=_request_source(run, text), gpus=tuple(gpus))


def _request_source(run: Run, text: "HeldOutText") -> RequestSource:
    """Return the sources, besides the text, of requests in a load as in use."""
    asked = run.options.max_model_len
    lengths = [asked, run.artifact.context, run.baseline.context]
    known = [length for length in lengths if length is not None]
    return RequestSource(min(known, default=LONGEST), text.end_token, text.conversations)


def _score_meanwhile(score: Callable[[], ScoresT], servers: Sequence[SubprocessEndpoint]) -> ScoresT:
    """Score the answers while the servers stop."""
    with ThreadPoolExecutor() as threads:
        stops = [threads.submit(server.stop) for server in servers]
        scores = score()
        for stop in stops:
            stop.result()
    return scores


@contextmanager
def leaving_cores(servers: int) -> Iterator[None]:
    """Inside the `with` block, torch leaves one core to each starting server. Several threads that share one
    core take longer than one thread alone.
    """
    with _threads(max(1, torch.get_num_threads() - servers)):
        yield


@contextmanager
def on_all_cores() -> Iterator[None]:
    """Inside the `with` block, torch also uses the core that is otherwise left to servers and clients, unless
    the user has chosen another number of threads.
    """
    threads = torch.get_num_threads()
    with _threads(threads_alone() if threads == model_threads() else threads):
        yield


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _in_turns(
    run: Run, text: "HeldOutText", servers: _ServerGroup
) -> tuple[RunFigures, tuple[TaskScore, ...]]:
    names = [side.name for side in servers.sides]
    by_side = dict(zip(names, servers.started, strict=True))
    turns = TakingTurns(by_side)
    try:
        served = serve_in_turns(turns, names, _gate_run(run, text))
        # Before another side takes its place.
        _require_alive([by_side[turns.up]] if turns.up else [])
        if run.options.batch_invariance != "tuned":
            served = replace(served, company=_in_company(run, turns.take("artifact"), text))
        scores = _task_scores(run, turns.take)
        _require_alive([by_side[turns.up]] if turns.up else [])
        return served, scores
    finally:
        turns.stop()


def _require_alive(servers: Sequence[SubprocessEndpoint]) -> None:
    """Raise UserError if the machine has ended a server, which decides nothing; a server's own crash is a
    failure.
    """
    for server in servers:
        if reason := server.why_gone():
            raise UserError(
                f"{reason}. Nothing was decided; run the same command again (the server's log: {server.log})"
            )


def _in_company(run: Run, artifact: Endpoint, text: "HeldOutText") -> CompanyFigures | None:
    """Return None if the artifact's server does not claim batch invariance. Requests that test batch
    invariance have the same time limit as the gate's other requests.
    """
    claim, workload = run.options.batch_invariance, run.workload
    if claim == "tuned":
        return None
    with run.clock.stage(BATCH_INVARIANCE):
        return compare_in_company(
            artifact, claim, text.token_ids, max(workload.ms), workload.input_len, workload.output_len
        )


def _task_scores(run: Run, server: Callable[[str], Endpoint]) -> tuple[TaskScore, ...]:
    """Return the scores of lm-eval's tasks. The tasks run last, so that the measurements come first.

    server: the endpoint of a side's running server
    """
    tasks = run.asked.tasks
    if tasks is None:
        return ()
    context, concurrent = run.options.max_model_len or CONTEXT, run.options.max_num_seqs
    with run.clock.stage("lm-eval"):
        return paired_scores(
            evaluate(server("artifact"), run.artifact.folder, tasks, context, concurrent),
            evaluate(server("baseline"), run.baseline.folder, tasks, context, concurrent),
        )
