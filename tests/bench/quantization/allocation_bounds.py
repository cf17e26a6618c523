"""What a budget of bits can buy at most, by the table of sensitivities in an artifact's manifest.

    python -P tests/bench/quantization/allocation_bounds.py ARTIFACT --out OUT/allocation_bounds.json

ARTIFACT was made with `quantize --target-bits`. Divergences of groups of layers are added up, as
`allocation.py` does, and the least sum under each budget is found exactly (a knapsack over bits, in steps of
2,048): with the group sizes that were measured, and with formats of 8 bits and more supposed to cost nothing.
Uniform recipes stand beside it. What is not below them here cannot be made so by choosing better.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scalegate.base.atomic_files import write_json
from scalegate.layouts.formats.int4 import Int4
from scalegate.pipeline.quantization.budget.allocation import Budget, allocate
from scalegate.pipeline.quantization.budget.mixed_recipe import GROUPS, SENSITIVITY
from scalegate.pipeline.quantization.budget.sensitivity import GROUP_SIZES, Group
from scalegate.pipeline.records.artifact import Artifact

STEP = 2048
FREE_BITS = 8 + 20 / 128
"""Of a format that is supposed to cost nothing: eight bits in groups of 128."""
BUDGETS = (4.3125, 4.5, 4.625)


def least(groups: Sequence[Group], budget: float, free: bool) -> float:
    """The least sum of divergences at `budget` bits a weight."""
    room = int(budget * sum(group.weights for group in groups) / STEP)
    sums = {0: 0.0}
    for group in groups:
        choices = [
            (-(-sum(spec.bits_per_weight(n, k) * n * k for n, k in group.shapes) // STEP), divergence)
            for spec, divergence in group.divergence.items()
        ]
        choices += [(-(-FREE_BITS * group.weights // STEP), 0.0)] if free else []
        longer: dict[int, float] = {}
        for taken, divergence in sums.items():
            for bits, more in choices:
                place = taken + int(bits)
                if place <= room and divergence + more < longer.get(place, float("inf")):
                    longer[place] = divergence + more
        sums = longer
    return min(sums.values())


def bounds(groups: Sequence[Group]) -> dict[str, Any]:
    uniform = {}
    for size in GROUP_SIZES:
        spec = Int4(size)
        bits = sum(spec.bits_per_weight(n, k) * n * k for group in groups for n, k in group.shapes)
        cost = sum(group.divergence[spec] for group in groups)
        uniform[f"g{size}"] = {"bits": bits / sum(group.weights for group in groups), "kl": cost}
    return {
        "uniform": uniform,
        "budgets": {
            str(bits): {
                "allocated": allocate(groups, Budget(bits)).divergence,
                "least": least(groups, bits, free=False),
                "least with 8 bits at no cost": least(groups, bits, free=True),
            }
            for bits in BUDGETS
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    artifact = Artifact.read(options.artifact)
    table = artifact.quantization[SENSITIVITY]
    found = {"checkpoint": Path(artifact.source).name} | bounds(
        [Group.from_json(entry) for entry in table[GROUPS]]
    )
    write_json(options.out, found)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
