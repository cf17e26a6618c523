"""What sound servers show at rest: the figures that the bounds of `at rest` and `drift` were taken from.

    python -P tests/bench/gate/at_rest.py examples/qwen3-pycode-5m --runs 10

Each run starts the checkpoint in INT4 and as it is, measures blocks at M = 1 and 8, sends a larger load and
leaves some requests early, then looks at the INT4 server as a gate run does, and at the other one alone. None
may fail. The largest figures of all runs are printed. `--again` is how often the same servers are looked at.
"""

import argparse
import json
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
from scalegate.base.atomic_files import write_json
from scalegate.base.stage_clock import StageClock
from scalegate.pipeline.checkpoints.checkpoint import open_checkpoint
from scalegate.pipeline.cli.forked_servers import servers_forked
from scalegate.pipeline.commands.quantize import quantize
from scalegate.pipeline.validation.held_out import read_held_out
from scalegate.pipeline.validation.servers import server_of, sized_options
from scalegate.serving_check.adapters import Endpoint
from scalegate.serving_check.adapters.all_engines import DEFAULT_ENGINE
from scalegate.serving_check.adapters.engine import ServerJob
from scalegate.serving_check.checks.in_use.at_rest import bytes_a_request, check_at_rest
from scalegate.serving_check.checks.in_use.drift import check_drift
from scalegate.serving_check.evidence.at_rest import AtRestFigures
from scalegate.serving_check.evidence.environment import describe_environment
from scalegate.serving_check.evidence.measurement import Block, MeasuredM
from scalegate.serving_check.gate.at_rest import Sides, look_after, look_before
from scalegate.serving_check.gate.interleaving import Servers, measure, workload_spec
from scalegate.serving_check.gate.repeats import Repeats
from scalegate.serving_check.settings import Bounds, WorkloadSettings
from scalegate.serving_check.workload import run_workload

RESULT = Path(__file__).parents[1] / "results" / "gate" / "at_rest.json"
WORKLOAD = WorkloadSettings(ms=(1, 8), max_blocks=6)
IN_USE_M, IN_USE_BLOCKS, LEFT = 32, 4, 24
"""A load beyond the blocks': repeats of either server, and requests whose clients leave."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--again", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    environment = vars(describe_environment("cpu", "auto", DEFAULT_ENGINE, DEFAULT_ENGINE))
    looks: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as work, servers_forked(DEFAULT_ENGINE, "cpu"):
        artifact = Path(work) / "artifact"
        quantize(str(options.checkpoint), "int4-hqq", out=artifact, progress=False)
        for run in range(options.runs):
            looks += one_run(artifact, options.checkpoint, Path(work), run, options.again)
            write_json(options.out, {"environment": environment, "most": most(looks), "looks": looks})
    print(json.dumps(most(looks), indent=1))
    sys.exit(any("fail" in (look["at_rest"], look["drift"]) for look in looks))


def one_run(artifact: Path, baseline: Path, work: Path, seed: int, again: int) -> list[dict[str, Any]]:
    load = sized_options({"device": "cpu", "max_num_seqs": IN_USE_M}, WORKLOAD)
    text = read_held_out(None, open_checkpoint(str(artifact)), open_checkpoint(str(baseline)), 4096)
    with (
        server_of(
            ServerJob(DEFAULT_ENGINE, "artifact", artifact, load, work / "artifact.log", progress=False)
        ) as ours,
        server_of(
            ServerJob(DEFAULT_ENGINE, "baseline", baseline, load, work / "baseline.log", progress=False)
        ) as theirs,
    ):
        repeat = Repeats(run_workload, ours, theirs, text.token_text)
        workload = WorkloadSettings(ms=WORKLOAD.ms, max_blocks=WORKLOAD.max_blocks, seed=seed)
        servers = Servers(ours, theirs, workload, text.token_ids, repeat)
        measured, _ = measure(servers, Bounds(), StageClock(shown=False))
        looks = []
        for _ in range(again):
            for endpoint, other in ((ours, theirs), (theirs, None)):
                before = look_before(endpoint)
                for block in range(IN_USE_BLOCKS):
                    repeat(endpoint, workload_spec(workload, IN_USE_M, text.token_ids, block))
                for index in range(LEFT):
                    leave_early(endpoint, text.token_ids[index : index + 64])
                began = time.monotonic()
                sides = Sides(endpoint, other, workload, text.token_ids, repeat)
                blocks = measured if other is not None else [turned(level) for level in measured]
                figures = look_after(sides, blocks, before, IN_USE_M * IN_USE_BLOCKS + LEFT)
                seconds = round(time.monotonic() - began, 1)
                looks.append({"of": endpoint.model, "seconds": seconds} | row(figures))
                shown = {name: value for name, value in looks[-1].items() if name != "figures"}
                print(json.dumps(shown), flush=True)
    return looks


def turned(level: MeasuredM) -> MeasuredM:
    """As if the baseline were the artifact, measured alone."""
    return MeasuredM(level.m, [Block(block.baseline) for block in level.blocks])


def row(figures: AtRestFigures) -> dict[str, Any]:
    at_rest, drift = check_at_rest(figures), check_drift(figures)
    return {
        "at_rest": at_rest.status,
        "drift": drift.status,
        **drift.figures,
        "bytes_a_request": bytes_a_request(figures.burst),
        "burst_bytes": grown(figures.burst[0].memory_bytes, figures.burst[-1].memory_bytes),
        "bytes_in_all": grown(figures.before.memory_bytes, figures.after.memory_bytes),
        "figures": asdict(figures),
    }


def grown(before: int | None, after: int | None) -> int:
    return (after or 0) - (before or 0)


def leave_early(endpoint: Endpoint, prompt: Any) -> None:
    body = {"prompt": list(prompt), "max_tokens": 64, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", endpoint.base_url + "/v1/completions", json=body, timeout=60) as response:
        next(response.iter_lines())


def most(looks: list[dict[str, Any]]) -> dict[str, float]:
    names = ("seconds", "first_m_slower", "burst_slower", "bytes_a_request", "burst_bytes", "bytes_in_all")
    return {name: max(look[name] for look in looks) for name in names}


if __name__ == "__main__":
    main()
