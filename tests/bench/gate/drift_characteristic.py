"""How often the check `drift` is right: simulated looks at servers that become slower by so much, or do not.

    python -P tests/bench/gate/drift_characteristic.py --looks 2000

The log speeds of a repeat and of the baseline's beside it scatter by `noise` together, half of the variance
each, with the long tail of a shared machine. Between first and last repeats the machine changes by a normal
shift, twice the noise for the baseline, which contention for memory slows most; for the artifact by a share
of it that is drawn anew for each look, from none to all. Parts of the burst scatter as repeats do. The result
is the share of looks that pass, fail or stay inconclusive.
"""

import argparse
import json
import math
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

from scalegate.base.atomic_files import write_json
from scalegate.serving_check.checks.in_use.drift import check_drift, shows_step
from scalegate.serving_check.evidence.at_rest import AtRestFigures, BurstPart, Rest
from scalegate.serving_check.gate.at_rest import CONFIRMING_PARTS, LEAST_LAST, MOST_LAST, PARTS

RESULT = Path(__file__).parents[1] / "results" / "gate" / "drift_characteristic.json"
NOISES = (0.03, 0.06, 0.12, 0.18)
SHIFT_OVER_NOISE = 2.0
"""Of the machine between first and last repeats, over the noise of one repeat: in two verdicts with a noise
of 19%, the baseline took 1.36 times as long at the end, and 0.7 times."""
SLOWER = (1.0, 1.1, 1.2, 1.3, 1.5, 2.0)
DISTURBED, BY = 0.05, 0.4
"""Share of repeats in which something else runs, and how much longer, in log, these take at most."""
STEP_AT = (2, 3, 4, 5, 6)
AT_REST = Rest(0, 0, 0.0, None)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--looks", type=int, default=2000)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    rows = []
    for noise in NOISES:
        for slower in SLOWER:
            for what, look in (("first M", first_m_slower), ("burst", burst_with_step)):
                draw = random.Random(f"{what} {noise} {slower}")
                found = Counter(look(draw, noise, slower) for _ in range(options.looks))
                shares = {status: count / options.looks for status, count in sorted(found.items())}
                rows.append({"what": what, "noise": noise, "slower": slower, **shares})
                print(json.dumps(rows[-1]), flush=True)
    write_json(options.out, {"looks": options.looks, "rows": rows})


def first_m_slower(draw: random.Random, noise: float, slower: float) -> str:
    """As `gate/at_rest.py` repeats the first M: more often while it is inconclusive."""
    of_baseline = draw.gauss(0, SHIFT_OVER_NOISE * noise)
    drift = math.log(slower) + draw.random() * of_baseline
    own_noise = noise / math.sqrt(2)

    def speed(drift: float) -> float:
        return math.exp(-drift + disturbed(draw, own_noise))

    figures = AtRestFigures(
        0, AT_REST, AT_REST, (), 1, tuple(speed(0.0) for _ in range(LEAST_LAST)), (),
        baseline_first=tuple(speed(0.0) for _ in range(LEAST_LAST)),
    )  # fmt: skip
    while len(figures.last) < MOST_LAST:
        if len(figures.last) >= LEAST_LAST and check_drift(figures).status != "inconclusive":
            break
        figures = replace(
            figures,
            last=(*figures.last, speed(drift)),
            baseline_last=(*figures.baseline_last, speed(of_baseline)),
        )
    return check_drift(figures).status


def burst_with_step(draw: random.Random, noise: float, slower: float) -> str:
    """All parts from one on take longer. More are sent if they show a step, as `gate/at_rest.py` does."""
    at = draw.choice(STEP_AT)
    parts: list[BurstPart] = []
    baseline: list[BurstPart] = []
    while len(parts) < PARTS or (len(parts) < PARTS + CONFIRMING_PARTS and shows_step(parts, baseline)):
        step = math.log(slower) if len(parts) >= at else 0.0
        parts.append(BurstPart(100, math.exp(step - disturbed(draw, noise))))
        # It is shorter, and so less exact.
        baseline.append(BurstPart(15, math.exp(-disturbed(draw, 2 * noise))))
    even = (1.0,) * LEAST_LAST
    figures = AtRestFigures(0, AT_REST, AT_REST, tuple(parts), 1, even, even, tuple(baseline), even, even)
    return check_drift(figures).status


def disturbed(draw: random.Random, noise: float) -> float:
    """Log noise of one speed."""
    return draw.gauss(0, noise) - (draw.uniform(0, BY) if draw.random() < DISTURBED else 0.0)


if __name__ == "__main__":
    main()
