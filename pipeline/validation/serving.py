"""The servers of a validation: up together where they fit, else in turns, and down again whatever happens."""

import functools
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch

from ...base.errors import UserError
from ...serving_check.adapters import Endpoint
from ...serving_check.adapters.starting import restart, starting
from ...serving_check.adapters.subprocess_endpoint import SubprocessEndpoint
from ...serving_check.adapters.taking_turns import TakingTurns
from ...serving_check.checks.batch_invariance import NAME as BATCH_INVARIANCE
from ...serving_check.evidence.company import CompanyFigures, compare_in_company
from ...serving_check.evidence.task_scores import TaskScore
from ...serving_check.gate.gate import GateRun, RunFigures, serve_and_measure, serve_in_turns
from ...serving_check.gate.interleaving import Rival
from ...serving_check.gate.turns import require_groups
from .gpu_memory import Side, plan_memory
from .run import Run
from .servers import baseline_options, has_room, may_start_at_once, server_of, sides_of
from .task_scores import CONTEXT, evaluate, paired_scores

if TYPE_CHECKING:
    from .held_out import HeldOutText


class HasText(Protocol):
    """What was looked at holds the text that prompts are cut from."""

    @property
    def text(self) -> "HeldOutText": ...


Looked = TypeVar("Looked", bound=HasText)
Scored = TypeVar("Scored")


def serve_sides(
    run: Run, look: Callable[[bool], Looked], score: Callable[[Looked, RunFigures], Scored]
) -> tuple[Looked, RunFigures, tuple[TaskScore, ...], Scored]:
    """All servers measured beside one another, or one after another where they do not fit together.

    look:  what is done besides, while they start where there is room for it, and before that where not; it
           is told which
    score: what is done with their answers, while they stop or after that

    UserError where a server was ended from elsewhere.
    """
    wanted = [
        ("artifact", run.engine, run.artifact, run.served_options),
        ("baseline", run.baseline_engine, run.baseline, run.baseline_options),
    ]
    if run.rival is not None:
        wanted.append(("rival", run.engine, run.rival, baseline_options(run.options)))
    sides = sides_of(wanted, run.placement)
    roomy = has_room(sides)
    looked = None if roomy else look(False)
    scored = None
    # Only now: what was loaded here is gone from the GPU.
    plan = plan_memory(sides, run.placement)
    logs = Path(tempfile.mkdtemp(prefix="scalegate-logs-"))
    servers = [
        server_of(
            side.engine,
            side.name,
            side.checkpoint.folder,
            side.options,
            logs,
            run.progress,
            run.placement,
            side.devices,
            plan.grants[side.name],
        )
        for side in sides
    ]
    started = [server for server in servers if isinstance(server, SubprocessEndpoint)]
    can_restart = len(started) == len(servers) and all(server.keeps_address for server in started)
    if not plan.together and not can_restart:
        raise UserError("the servers do not fit on the GPU together, and cannot be started in turns here")
    if not plan.together:
        require_groups(run.workload)
    if plan.together:
        at_once = roomy or may_start_at_once(sides, plan)
        with starting(servers, together=at_once) as endpoints:
            if looked is None:
                with leaving_cores(len(started)):
                    looked = look(True)
            with run.clock.stage("waiting for the servers"):
                artifact, baseline, *rivals = endpoints()
            served = serve_and_measure(
                artifact,
                baseline,
                _gate_run(run, looked.text),
                restart=functools.partial(restart, started, at_once) if can_restart else None,
                rival=Rival(rivals[0], run.bounds.max_first_rival_m) if rivals else None,
            )
            served = replace(served, company=_in_company(run, artifact, looked.text))
            scores = _task_scores(run, {"artifact": artifact, "baseline": baseline}.__getitem__)
            _require_alive(started)
            up = run.clock.elapsed
            scored = _score_meanwhile(functools.partial(score, looked, served), started) if roomy else None
        run.clock.add("stopping the servers", run.clock.elapsed - up)
    else:
        looked = look(False) if looked is None else looked
        by_side = dict(zip([side.name for side in sides], started, strict=True))
        served, scores = _in_turns(run, looked.text, sides, by_side)
    # Left behind where a server failed: the error names the log.
    shutil.rmtree(logs)
    return looked, served, scores, score(looked, served) if scored is None else scored


def _gate_run(run: Run, text: "HeldOutText") -> GateRun:
    return GateRun(run.workload, run.bounds, text.token_ids, text.token_text, run.clock)


def _score_meanwhile(score: Callable[[], Scored], servers: Sequence[SubprocessEndpoint]) -> Scored:
    """While the servers stop."""
    with ThreadPoolExecutor() as threads:
        stops = [threads.submit(server.stop) for server in servers]
        scored = score()
        for stop in stops:
            stop.result()
    return scored


@contextmanager
def leaving_cores(servers: int) -> Iterator[None]:
    """Inside, torch leaves a core to each of so many servers that start: threads that wait for one another's
    turn on a core take longer together than one does alone."""
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, threads - servers))
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _in_turns(
    run: Run, text: "HeldOutText", sides: Sequence[Side], servers: dict[str, SubprocessEndpoint]
) -> tuple[RunFigures, tuple[TaskScore, ...]]:
    run.clock.say("the servers do not fit on the GPU together: they take turns")
    turns = TakingTurns(servers)
    try:
        served = serve_in_turns(turns, [side.name for side in sides], _gate_run(run, text))
        # Before another side takes its place.
        _require_alive([servers[turns.up]] if turns.up else [])
        if run.options.batch_invariance != "tuned":
            served = replace(served, company=_in_company(run, turns.take("artifact"), text))
        scores = _task_scores(run, turns.take)
        _require_alive([servers[turns.up]] if turns.up else [])
        return served, scores
    finally:
        turns.stop()


def _require_alive(servers: Sequence[SubprocessEndpoint]) -> None:
    """A server that the machine has ended decides nothing; one that what it serves has ended is a failure."""
    for server in servers:
        if reason := server.why_gone():
            raise UserError(f"{reason}. Nothing was decided; run it again (its log: {server.log})")


def _in_company(run: Run, artifact: Endpoint, text: "HeldOutText") -> CompanyFigures | None:
    """None where the artifact's server claims nothing. As late as other requests of the gate's own."""
    claim, workload = run.options.batch_invariance, run.workload
    if claim == "tuned":
        return None
    with run.clock.stage(BATCH_INVARIANCE):
        return compare_in_company(
            artifact, claim, text.token_ids, max(workload.ms), workload.input_len, workload.output_len
        )


def _task_scores(run: Run, server: Callable[[str], Endpoint]) -> tuple[TaskScore, ...]:
    """Last, so that what is measured is measured on servers that have met nothing else.

    server: the endpoint of a side, up
    """
    if run.tasks is None:
        return ()
    tasks, context, concurrent = run.tasks, run.options.max_model_len or CONTEXT, run.options.max_num_seqs
    with run.clock.stage("lm-eval"):
        return paired_scores(
            evaluate(server("artifact"), run.artifact.folder, tasks, context, concurrent),
            evaluate(server("baseline"), run.baseline.folder, tasks, context, concurrent),
        )
