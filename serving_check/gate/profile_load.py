"""Plans the blocks of a profile of loads. A trial block shows how many requests there is time for."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from ..adapters import Endpoint
from ..evidence.answer_figures import TokenText
from ..evidence.in_use import BlockInUse
from ..evidence.measurement import MeasuredM
from ..profiles import PROFILES
from ..settings import WorkloadSettings
from ..workload.open_loop import run_open_loop
from ..workload.planned_request import PlannedRequest
from ..workload.profile_plan import ProfileShape, plan_profile, shape_of_profile
from .in_use import (
    BLOCKS,
    FIRST_DEADLINE_S,
    SEED_OF_BLOCKS,
    LoadInUse,
    PlannedProfile,
    prompt_speed,
)
from .interleaving import SEEDS_PER_RUN

PROFILE_BLOCKS = 4
"""Number of a profile's blocks on either side: confidence limits from four have three degrees of freedom."""
PROFILE_SHARE = 0.12
"""Share of the time until then, in which all requests of a profile come, if the trial block does not take too
long: on two idle cores both servers take four times as long to answer them."""
MOST_OF_PROFILE = 0.5
"""The time for a profile with its trial block, as a share of the time until then."""
LEAST_PROFILE_S = 1.6
"""The least number of seconds over which the requests of a block arrive, before it is cut."""
LEAST_SHARE = 0.1
"""The least share of its requests to which a profile is cut."""
SEED_OF_PROFILE = SEED_OF_BLOCKS + BLOCKS


@dataclass(frozen=True)
class ProfileLoad:
    """A profile that a workload asks for, and what its requests are planned by.

    prompt_speed, answer_speed: tokens per second that the baseline reads, and that it writes at its best M
    context: the most tokens of a request that both servers accept
    text: token ids that prompts are cut from
    """

    name: str
    prompt_speed: float
    answer_speed: float
    context: int
    text: Sequence[int]
    seed: int

    def planned(self, baseline: Endpoint, tokenizer: TokenText, elapsed: float) -> LoadInUse:
        """Send a trial block to the baseline's server; return as many blocks as there is time for.

        elapsed: seconds that the run has taken so far; a profile takes a share of this
        """
        seconds = max(LEAST_PROFILE_S, PROFILE_SHARE * elapsed / (2 * PROFILE_BLOCKS))
        begun = time.monotonic()
        run_open_loop(baseline, self._block(PROFILE_BLOCKS, self._shape(seconds)), FIRST_DEADLINE_S)
        shape = self._shape(seconds * share_of_requests(time.monotonic() - begun, elapsed))
        blocks = tuple(tuple(self._block(index, shape)) for index in range(PROFILE_BLOCKS))
        return LoadInUse(blocks, (), tokenizer, PlannedProfile(self.name, shape.scale))

    def _shape(self, seconds: float) -> ProfileShape:
        profile, speeds = PROFILES[self.name], (self.prompt_speed, self.answer_speed)
        return shape_of_profile(profile, seconds, *speeds, self.context, longest_prompt=len(self.text) // 2)

    def _block(self, index: int, shape: ProfileShape) -> list[PlannedRequest]:
        return plan_profile(self.seed + index, PROFILES[self.name], shape, self.text)


def profile_load(
    measured: Sequence[MeasuredM],
    workload: WorkloadSettings,
    text: Sequence[int],
    context: int,
    in_use: LoadInUse,
    shown: Sequence[BlockInUse],
) -> ProfileLoad | None:
    """Return the profile that the workload asks for; None if it asks for none.

    shown: what the baseline's server showed of the load `in_use`, whose longest prompts say how fast it reads
    """
    if workload.profile is None:
        return None
    levels = [level for level in measured if level.baseline]
    return ProfileLoad(
        workload.profile,
        max(prompt_speed(levels, workload), in_use.prompt_speed(shown)),
        max(median(served.output_throughput for served in level.baseline) for level in levels),
        context,
        text,
        workload.seed * SEEDS_PER_RUN + SEED_OF_PROFILE,
    )


def share_of_requests(trial_s: float, elapsed: float) -> float:
    """Return the share of a trial block's requests that each block has time for.

    trial_s: the seconds that the trial block took; elapsed: the seconds of the run before it
    """
    left = (MOST_OF_PROFILE * elapsed - trial_s) / (2 * PROFILE_BLOCKS)
    return min(1.0, max(LEAST_SHARE, left / trial_s))
