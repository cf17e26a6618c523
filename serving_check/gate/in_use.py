"""Sends both servers a load as in use: blocks of the same requests at the same times, one after the other.

The baseline's repeats say how fast requests must come for M to rise from one to more than the largest M.
`workload/use_plan.py` draws the requests, `workload/open_loop.py` sends them.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from statistics import median

from ..adapters import Endpoint
from ..checks.canary import Continuation
from ..evidence.answer_figures import TokenText
from ..evidence.as_asked import not_as_asked, seeds_kept
from ..evidence.in_use import BlockInUse, FiguresInUse, PartsInUse, ProfileFigures, SideInUse
from ..evidence.measurement import MeasuredM, Repeat
from ..evidence.served_in_use import ServedInUse, answers_to_score
from ..settings import WorkloadSettings
from ..workload.kinds_taken import (
    AcceptedKinds,
    draws_choices_apart,
    heeds_repetition_penalty,
    kinds_taken,
)
from ..workload.open_loop import OpenLoopResult, run_open_loop
from ..workload.planned_request import Kind, PlannedRequest
from ..workload.use_plan import MEAN_ANSWER, Conversations, UseShape, fewest_requests, plan_requests
from .interleaving import SEEDS_PER_RUN
from .repeats import deadline_from

BLOCKS = 3
"""Number of blocks on either side: with two, no throughput ratio could fail."""
LEAST_SECONDS = 0.8
"""The least number of seconds over which the requests of a block arrive: the machine's other work then falls
on several blocks."""
LEAST_REQUESTS = 72
"""The least number of requests in a block: three blocks then have more answers than are scored, and M exceeds
the largest M. `tests/bench/results/gate/power_requests.json` compares what so many requests show with what
twice as many show."""
FIRST_LOAD = 0.5
"""The load at a block's beginning, as a share of what a server handles with one request at a time."""
LAST_LOAD = 1.3
"""The load at a block's end, as a share of what a server handles at the largest M: M grows beyond it."""
REQUESTS_PER_M = 1.5
"""Requests in a block as a multiple of the largest M, so that this M is exceeded at the block's end."""
PROMPTS_SHARE = 0.4
"""The largest share of a block's time that is spent on prompts."""
LONGEST_USUAL = 1024
"""The most tokens of all other prompts: a few longer ones would take most of a block."""
LONG_PROMPT_S = 1.0
"""Seconds for the longest prompt of the first block, estimated from the speed of shorter prompts."""
FIRST_DEADLINE_S = 600.0
"""The deadline of a request, in seconds, until the baseline's slowest request is known."""
SEED_OF_BLOCKS = 700_000
"""The first block's seed, added to the workload's own, so that its prompts differ from the repeats'
prompts."""
HEEDED_PROMPT = 64
"""Tokens of the prompt by which the baseline's server shows whether it heeds a repetition penalty."""


@dataclass(frozen=True)
class ServedLoad:
    """The figures of a load as in use, before its answers are compared with logits."""

    figures: FiguresInUse
    answers: tuple[ServedInUse, ...]
    """The answers of the artifact's server that are to be scored."""

    @property
    def requests(self) -> int:
        """Return the number of requests that were sent to the artifact's server."""
        return sum(block.requests for block in self.figures.all_blocks if block.artifact is not None)


@dataclass(frozen=True)
class LoadInUse:
    """The plan of the blocks, and the figures that are read with them."""

    blocks: tuple[tuple[PlannedRequest, ...], ...]
    unknown: tuple[str, ...]
    """The kinds of requests that the servers do not support, in a few words each."""
    tokenizer: TokenText
    profile: "PlannedProfile | None" = None
    """The profile, if these are the blocks of a profile; else None."""

    @property
    def kinds(self) -> frozenset[Kind]:
        """Return the kinds that were requested from the servers."""
        return frozenset(request.kind for requests in self.blocks for request in requests)

    def serve(self, artifact: Endpoint, baseline: Endpoint) -> ServedLoad:
        """Send block after block, one side after the other: B A, A B, B A. The first failed request ends the
        load.
        """
        sides: dict[Endpoint, list[OpenLoopResult]] = {artifact: [], baseline: []}
        slowest = 0.0
        for index, requests in enumerate(self.blocks):
            for endpoint in (baseline, artifact) if index % 2 == 0 else (artifact, baseline):
                timeout = deadline_from(slowest) if slowest else FIRST_DEADLINE_S
                result = run_open_loop(endpoint, requests, timeout)
                sides[endpoint].append(result)
                if endpoint == baseline:
                    slowest = max([slowest, *(record.e2el for record in result.records)])
                if any(record.error for record in result.records):
                    return self.served(sides[artifact], sides[baseline])
        return self.served(sides[artifact], sides[baseline])

    def serve_one(self, endpoint: Endpoint) -> list[OpenLoopResult]:
        """Send all blocks to one server, if only one is up at a time; the first failed request ends them."""
        results: list[OpenLoopResult] = []
        for requests in self.blocks:
            results.append(run_open_loop(endpoint, requests, FIRST_DEADLINE_S))
            if any(record.error for record in results[-1].records):
                break
        return results

    def served(self, artifact: Sequence[OpenLoopResult], baseline: Sequence[OpenLoopResult]) -> ServedLoad:
        """Return the figures of both sides' blocks, oldest first."""
        blocks = [
            BlockInUse(
                len(requests),
                self._side(artifact, index),
                self._side(baseline, index),
                kinds=tuple(request.full_kind for request in requests),
                prompt_tokens=tuple(len(request.prompt) for request in requests),
            )
            for index, requests in enumerate(self.blocks)
            if index < max(len(artifact), len(baseline))
        ]
        answers = answers_to_score(artifact, self.tokenizer)
        return ServedLoad(FiguresInUse(tuple(blocks), unknown=self.unknown), answers)

    def _side(self, results: Sequence[OpenLoopResult], index: int) -> SideInUse | None:
        if index >= len(results):
            return None
        result = results[index]
        side = SideInUse.of(result, not_as_asked(result, self.tokenizer), seeds_kept(result))
        return side if self.profile is None else replace(side, parts=PartsInUse.of(result.records))

    def prompt_speed(self, shown: Sequence[BlockInUse]) -> float:
        """Return prompt tokens per second of the baseline: of the request that was read fastest."""
        return max(
            (
                len(request.prompt) / ttft
                for requests, block in zip(self.blocks, shown, strict=False)
                if block.baseline is not None
                for request, ttft in zip(requests, block.baseline.ttfts, strict=True)
                if ttft
            ),
            default=0.0,
        )

    def with_profile(self, in_use: ServedLoad, served: ServedLoad) -> ServedLoad:
        """Return `in_use` with the figures of this profile.

        served: the results of both sides' blocks
        """
        if self.profile is None:
            return in_use
        figures = ProfileFigures(
            self.profile.name,
            self.profile.scale,
            tuple(tuple(len(request.prompt) for request in block) for block in self.blocks),
            tuple(tuple(request.output_len for request in block) for block in self.blocks),
            served.figures.blocks,
        )
        return replace(in_use, figures=replace(in_use.figures, profile=figures))


@dataclass(frozen=True)
class PlannedProfile:
    """A profile, and the factor that its lengths are scaled by."""

    name: str
    scale: float


@dataclass(frozen=True)
class RequestSource:
    """The sources of requests besides the text, if a load as in use is sent."""

    context: int
    """The most tokens of a request that both servers accept."""
    end_token: int | None
    conversations: Conversations | None


def plan_load(
    servers: Sequence[Endpoint],
    measured: Sequence[MeasuredM],
    workload: WorkloadSettings,
    text: Sequence[int],
    tokenizer: TokenText,
    source: RequestSource,
    canary: Sequence[Continuation],
) -> LoadInUse:
    """Plan blocks of requests that come as fast as the baseline's repeats say.

    servers: the running servers, which are asked what kinds of requests they accept
    text: token ids that prompts are cut from
    canary: the artifact's greedy texts, from which stop strings are taken
    """
    has_template = source.conversations is not None
    with ThreadPoolExecutor(len(servers)) as threads:
        asked = [threads.submit(kinds_taken, side, source.end_token, has_template) for side in servers]
        taken = _without_unheeded(servers[-1], [kinds.result() for kinds in asked], text)
    shape = shape_of(measured, workload, source, taken)
    answered = [(answer.prompt, answer.text) for answer in canary if answer.text]
    first = workload.seed * SEEDS_PER_RUN + SEED_OF_BLOCKS
    shapes = [shape, *[replace(shape, long_prompt=0)] * (BLOCKS - 1)]
    blocks = tuple(
        tuple(plan_requests(first + index, block_shape, text, answered, source.conversations))
        for index, block_shape in enumerate(shapes)
    )
    unknown = tuple(dict.fromkeys(word for kinds in taken for word in kinds.unknown))
    return LoadInUse(blocks, unknown, tokenizer)


def _without_unheeded(
    baseline: Endpoint, taken: Sequence[AcceptedKinds], text: Sequence[int]
) -> Sequence[AcceptedKinds]:
    """Leave out what the baseline's server accepts and does in a way of its own: that is the engine's."""
    starts = range(0, max(1, len(text) - HEEDED_PROMPT), HEEDED_PROMPT)
    prompts = [text[start : start + HEEDED_PROMPT] for start in starts]
    if _is_taken("repetition", taken) and not heeds_repetition_penalty(baseline, prompts):
        why = "the baseline's server does not apply repetition_penalty to tokens of the prompt"
        taken = [kinds.without("repetition", why) for kinds in taken]
    if _is_taken("choices", taken) and not draws_choices_apart(baseline, prompts[0]):
        why = "the baseline's server gives the same answer n times if there is a seed"
        taken = [kinds.without("choices", why) for kinds in taken]
    return taken


def _is_taken(kind: Kind, taken: Sequence[AcceptedKinds]) -> bool:
    return all(kind in kinds.kinds for kinds in taken)


def shape_of(
    measured: Sequence[MeasuredM],
    workload: WorkloadSettings,
    source: RequestSource,
    taken: Sequence[AcceptedKinds],
) -> UseShape:
    """Return the rates and lengths of a block's requests."""
    levels = [level for level in measured if level.baseline]
    rates = [median(repeat.output_throughput for repeat in level.baseline) / MEAN_ANSWER for level in levels]
    first, last = FIRST_LOAD * rates[0], LAST_LOAD * max(rates)
    kinds = frozenset.intersection(*(kinds.kinds for kinds in taken))
    requests = max(LEAST_REQUESTS, REQUESTS_PER_M * levels[-1].m, fewest_requests(kinds))
    seconds = max(LEAST_SECONDS, requests / ((first + last) / 2))
    speed = prompt_speed(levels, workload)
    return UseShape(
        seconds=seconds,
        first_rate=first,
        last_rate=last,
        prompt_tokens=int(PROMPTS_SHARE * seconds * speed),
        longest_prompt=min(source.context, LONGEST_USUAL),
        context=source.context,
        long_prompt=int(min(source.context, LONG_PROMPT_S * speed)),
        kinds=kinds,
        kinds_in_chats=frozenset.intersection(*(kinds.in_chats for kinds in taken)),
        end_token=source.end_token,
    )


def prompt_speed(levels: Sequence[MeasuredM], workload: WorkloadSettings) -> float:
    """Return prompt tokens per second of the baseline: M prompts come at once, the last first token ends
    them.
    """

    def of(level: MeasuredM, repeat: Repeat) -> float:
        together = min(level.m, repeat.requests)
        return together * workload.input_len / max(repeat.ttfts[:together], default=float("inf"))

    return max(median(of(level, repeat) for repeat in level.baseline if repeat.ttfts) for level in levels)
