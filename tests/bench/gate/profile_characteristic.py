"""How often the check `profile of loads` is right: simulated profiles of servers that read prompts so fast.

    python -P tests/bench/gate/profile_characteristic.py --profiles 20000

The log ratio of a block scatters by `noise`, with the long tail of a shared machine, and decoding scatters as
prompts do, as fast as the baseline's. `speed` is how fast the artifact reads prompts, over the baseline. The
result is the share of profiles that pass, fail or stay inconclusive.
"""

import argparse
import json
import math
import random
from collections import Counter
from pathlib import Path

from scalegate.base.atomic_files import write_json
from scalegate.serving_check.checks.in_use.profile import check_profile
from scalegate.serving_check.evidence.in_use import BlockInUse, PartsInUse, ProfileFigures, SideInUse
from scalegate.serving_check.evidence.profile_ratios import LEAST_GAPS
from scalegate.serving_check.gate.profile_load import PROFILE_BLOCKS
from scalegate.serving_check.settings import Bounds

RESULT = Path(__file__).parents[1] / "results" / "gate" / "profile_characteristic.json"
NOISES = (0.05, 0.1, 0.2, 0.4)
"""On two idle cores .06 to .11, beside other work .2 to .75."""
SPEEDS = (1.2, 1.0, 0.9, 0.7, 0.5, 0.38, 0.25)
DISTURBED, BY = 0.05, 0.4
"""Share of blocks in which something else runs, and how much longer, in log, these take at most."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--profiles", type=int, default=20_000)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    rows = []
    for noise in NOISES:
        for speed in SPEEDS:
            draw = random.Random(f"{noise} {speed}")
            found = Counter(judged(draw, noise, speed) for _ in range(options.profiles))
            shares = {status: count / options.profiles for status, count in sorted(found.items())}
            rows.append({"noise": noise, "speed": speed, **shares})
            print(json.dumps(rows[-1]), flush=True)
    floor = Bounds().throughput_floor
    write_json(options.out, {"profiles": options.profiles, "floor": floor, "rows": rows})


def judged(draw: random.Random, noise: float, speed: float) -> str:
    blocks = tuple(
        BlockInUse(12, side(disturbed(draw, noise) / speed, disturbed(draw, noise)), side(1.0, 1.0))
        for _ in range(PROFILE_BLOCKS)
    )
    lengths = ((100,) * 12,) * PROFILE_BLOCKS
    return check_profile("rag", ProfileFigures("rag", 1.0, lengths, lengths, blocks), Bounds()).status


def side(prompt_seconds: float, itl: float) -> SideInUse:
    parts = PartsInUse(prompt_seconds, {4: (2 * LEAST_GAPS, itl)})
    return SideInUse(0.0, 4.0, 600, (1.0,) * 12, (1.0,) * 12, {}, parts=parts)


def disturbed(draw: random.Random, noise: float) -> float:
    """The seconds of what takes one second, with noise of both sides."""
    return math.exp(draw.gauss(0, noise) + (draw.uniform(0, BY) if draw.random() < DISTURBED else 0.0))


if __name__ == "__main__":
    main()
