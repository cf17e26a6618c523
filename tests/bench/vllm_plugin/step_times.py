"""Where the time of a decoding step goes on the GPU, from a trace of torch's profiler.

A step begins with the kernel that runs once a step and takes longest, which is the output layer. Kernels that
are launched early (programmatic dependent launch) overlap with their predecessor; `own` counts only the time
after all kernels that began before have ended.
"""

import gzip
import itertools
import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

SKIPPED = 3
"""Steps at the beginning: prompts, and what follows them."""
KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")
Interval = tuple[float, float, str]


def of_newest(folder: Path, steps: int) -> dict[str, Any]:
    """Return the times of the newest trace in the folder, in which about so many steps ran."""
    newest = max(folder.glob("*.json.gz"), key=lambda path: path.stat().st_mtime, default=None)
    if newest is None:
        return {"reason": f"no trace in {folder}"}
    with gzip.open(newest, "rt") as file:
        events = json.load(file)["traceEvents"]
    found = of_intervals(
        [(e["ts"], e["ts"] + e["dur"], e["name"]) for e in events if e.get("cat") in KERNELS], steps
    )
    newest.unlink()
    return found


def of_intervals(intervals: list[Interval], steps: int) -> dict[str, Any]:
    """Return microseconds a step: whole, idle, and of each kernel (count, until its end, of its own).

    intervals: begin and end in microseconds, and name
    """
    intervals = sorted(intervals)
    by_name: dict[str, list[Interval]] = defaultdict(list)
    for each in intervals:
        by_name[each[2]].append(each)
    once = [name for name, them in by_name.items() if abs(len(them) - steps) <= 2]
    if not once or len(by_name[once[0]]) < SKIPPED + 2:
        return {"reason": "no kernel ran once a step", "counts": {n: len(t) for n, t in by_name.items()}}
    anchor = max(once, key=lambda name: sum(end - begin for begin, end, _ in by_name[name]))
    begins = [begin for begin, *_ in by_name[anchor]][SKIPPED:]
    idle, ended = 0.0, begins[0]
    totals: dict[str, list[float]] = defaultdict(lambda: [0, 0, 0])
    for begin, end, name in intervals:
        if begins[0] <= begin < begins[-1]:
            idle += max(0, begin - ended)
            own = max(0, end - max(begin, ended))
            totals[name] = [a + b for a, b in zip(totals[name], (1, end - begin, own), strict=True)]
            ended = max(ended, end)
    count = len(begins) - 1
    whole = [after - before for before, after in itertools.pairwise(begins)]
    kernels = {name[:160]: [round(each / count, 2) for each in total] for name, total in totals.items()}
    return {
        "anchor": anchor[:160],
        "step_us": round(sum(whole) / count, 1),
        "median_us": round(statistics.median(whole), 1),
        "idle_us": round(idle / count, 1),
        "kernels": dict(sorted(kernels.items(), key=lambda item: -item[1][2])),
    }
