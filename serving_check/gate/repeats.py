"""Runs one repeat: sends it with a deadline from the baseline's speed, and reduces it to figures.

`interleaving.py` chooses the repeats and their order.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from ..adapters import Endpoint
from ..adapters.cpu_time import cpu_seconds, own_processes, usable_by
from ..adapters.machine_cpu import CoresTime, cores_time
from ..evidence.answer_figures import ServedText, TokenText, served_texts, spread_evenly
from ..evidence.measurement import Repeat
from ..workload import WorkloadResult, WorkloadSpec

Runner = Callable[[Endpoint, WorkloadSpec], WorkloadResult]

DEADLINE_FACTOR = 20.0
"""A deadline as a multiple of the baseline's slowest request: the throughput check must see a tenfold
slowdown."""
DEADLINE_S = 5.0
"""Seconds added to this multiple."""
TEXTS_AT_LARGEST_M = 12
TEXTS_AT_OTHER_MS = 1
"""How many answers are scored at Ms other than the largest: each costs a forward pass on both models."""
LOOKED_FOR_EVERY_S = 2.0
"""Seconds between two searches for a server's processes: a search takes some 7 ms, and repeats wait for
it."""
MOST_KEPT = 4 * TEXTS_AT_LARGEST_M
"""How many answers of one M are kept until some are chosen for scoring: prompts can be long."""


class Repeats:
    """Runs repeats on every side, and keeps some of the artifact's answers at every M.

    artifact, baseline: their endpoints; None until their server has started
    """

    def __init__(
        self, run: Runner, artifact: Endpoint | None, baseline: Endpoint | None, tokenizer: TokenText | None
    ):
        self._run = run
        self.artifact = artifact
        self.baseline = baseline
        self._tokenizer = tokenizer
        self._slowest: dict[int, float] = {}
        """For each M, the seconds per output token of the baseline's slowest request so far."""
        self._texts: dict[int, list[ServedText]] = {}
        self._processes: dict[str, Sequence[int]] = {}
        """The ids of a server's processes, by the server's address."""
        self._own: Sequence[int] = []
        """The ids of the driver's and the servers' processes."""
        self._looked_for = -math.inf

    def __call__(self, endpoint: Endpoint, spec: WorkloadSpec) -> Repeat:
        spec = replace(
            spec,
            keep_answers=self._tokenizer is not None,
            request_timeout=self._deadline(spec),
        )
        idle = self._idle_processes(endpoint)
        before, others_before = cpu_seconds(idle), self._others_time()
        result = self._run(endpoint, spec)
        used = max(0.0, cpu_seconds(idle) - before) if idle else None
        others, stolen = _between(others_before, self._others_time())
        if endpoint == self.baseline:
            slowest = [seconds / spec.output_len for seconds in result.e2els]
            self._slowest[spec.m] = max([self._slowest.get(spec.m, 0.0), *slowest])
        elif endpoint == self.artifact and self._tokenizer is not None:
            texts = self._texts.get(spec.m, []) + served_texts(result, self._tokenizer, TEXTS_AT_LARGEST_M)
            self._texts[spec.m] = spread_evenly(texts, MOST_KEPT)
        return replace(
            Repeat.of(result, self._tokenizer),
            idle_cpu_seconds=used,
            others_cpu_seconds=others,
            stolen_seconds=stolen,
        )

    def _idle_processes(self, endpoint: Endpoint) -> list[int]:
        """Return the processes of the other server, artifact's or baseline's, if it was started here."""
        sides = [side for side in (self.artifact, self.baseline) if side is not None]
        if (now := time.monotonic()) > self._looked_for + LOOKED_FOR_EVERY_S:
            self._processes = {side.base_url: side.processes() for side in sides}
            servers = [pid for pids in self._processes.values() for pid in pids]
            self._own = sorted({*own_processes(), *servers}) if servers else []
            self._looked_for = now
        others = [side for side in sides if side != endpoint]
        return [pid for other in others for pid in self._processes.get(other.base_url, ())]

    def _others_time(self) -> CoresTime | None:
        """Return the time of the servers' cores that neither the servers nor this driver use; None if it is
        not known.
        """
        passed = cores_time(usable_by(self._own)) if self._own else None
        return passed and CoresTime(passed.busy - cpu_seconds(self._own), passed.stolen)

    def _deadline(self, spec: WorkloadSpec) -> float:
        """Return the time limit of a request; the spec's own until the baseline was measured at this M or a
        lower one.
        """
        known = [m for m in self._slowest if m <= spec.m]
        if not known:
            return spec.request_timeout
        nearest = max(known)
        return deadline_from(self._slowest[nearest] * spec.output_len * spec.m / nearest)

    def texts_to_score(self) -> list[ServedText]:
        """Return the answers to score, spread over all repeats, most of them of the largest M."""
        largest = max(self._texts, default=0)
        return [
            text
            for m, texts in sorted(self._texts.items())
            for text in spread_evenly(texts, TEXTS_AT_LARGEST_M if m == largest else TEXTS_AT_OTHER_MS)
        ]


def _between(before: CoresTime | None, after: CoresTime | None) -> tuple[float | None, float | None]:
    """Return the busy and the stolen seconds between two readings; None if they are not known."""
    if before is None or after is None:
        return None, None
    passed = after.since(before)
    return max(0.0, round(passed.busy, 2)), round(passed.stolen, 2)


def deadline_from(seconds: float) -> float:
    """Return the artifact's deadline in seconds if the baseline's slowest request took `seconds`."""
    return DEADLINE_FACTOR * seconds + DEADLINE_S


def tpot_of(repeats: Sequence[Repeat]) -> float | None:
    """Return the quickest repeat's median seconds per token."""
    medians = [sorted(repeat.tpots)[len(repeat.tpots) // 2] for repeat in repeats if repeat.tpots]
    return min(medians, default=None)
