"""The rival check on one GPU: NVFP4 against IQ2_XXS behind real servers, Qwen3-8B's shape, and then swapped.

    python -P tests/bench/gate/rival.py --folder /dev/shm --out OUT/rival_h200.json

Weights are random, both artifacts are made by `scalegate.quantize`, and `scalegate.validate` serves artifact,
baseline and rival side by side. Quality is measured on few tokens and means nothing here: what counts is the
check called `rival`, and its ratios. Exit status 1 where it does not pass, or does not fail once swapped.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from scalegate.pipeline.commands.validate import validate
from scalegate.serving_check.evidence.verdict import Verdict
from scalegate.tests.bench.engine.nvfp4_engine import checkpoints
from scalegate.tests.bench.random_qwen3 import SHAPES

ARTIFACT, RIVAL = "nvfp4", "iq2-xxs"
SWAPPED_MS = (4, 16, 32)
"""Where IQ2_XXS still is half as fast as bf16: what is slower ends a run before it is measured."""


def main() -> None:
    options = arguments()
    results: dict[str, Any] = {"model": options.model}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        kept = options.checkpoints or Path(folder)
        baseline, artifact = checkpoints(kept, options.model, ARTIFACT)
        _, rival = checkpoints(kept, options.model, RIVAL)
        for name, subject, other, ms, expected in [
            ("nvfp4 against iq2-xxs", artifact, rival, options.m, "pass"),
            ("iq2-xxs against nvfp4", rival, artifact, options.swapped_m, "fail"),
        ]:
            if ms:
                results[name] = {"expected": expected, **measured(subject, other, baseline, ms, options)}
            if options.out:
                options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    wrong = [
        name
        for name, found in results.items()
        if isinstance(found, dict) and found["rival"]["status"] != found["expected"]
    ]
    if wrong:
        sys.exit(f"not as expected: {wrong}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--m", type=int, nargs="*", default=[1, 4, 8, 16, 32, 64, 128])
    parser.add_argument("--swapped-m", type=int, nargs="*", default=SWAPPED_MS)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--max-blocks", type=int, default=11)
    parser.add_argument("--model", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--folder", type=Path, help="where checkpoints are made, best in memory: 27 GB")
    parser.add_argument("--checkpoints", type=Path, help="where they stay, and are taken from")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def measured(
    artifact: Path, rival: Path, baseline: Path, ms: list[int], options: argparse.Namespace
) -> dict[str, Any]:
    started = time.perf_counter()
    verdict = validate(
        artifact,
        baseline,
        rival=rival,
        m=ms,
        input_len=32,
        output_len=options.output_len,
        max_blocks=options.max_blocks,
        quality_tokens=1024,
        device=options.device,
    )
    told = {"seconds": time.perf_counter() - started, **figures(verdict)}
    print(f"{artifact.name} against {rival.name}, {told['seconds']:.0f} s:", flush=True)
    for row in told["rows"]:
        print(row, flush=True)
    print(told["rival"], told["checks"], sep="\n", flush=True)
    return told


def figures(verdict: Verdict) -> dict[str, Any]:
    check = next(check for check in verdict.checks if check.name == "rival")
    return {
        "device": verdict.environment.device,
        "verdict": verdict.status,
        "rival": {"status": check.status, "measured": check.measured, "reason": check.reason},
        "checks": {check.name: check.status for check in verdict.checks},
        "layouts": verdict.artifact.layouts,
        "versions": verdict.environment.versions,
        "rows": [row(point) for point in verdict.curve],
        "seconds_by_part": verdict.seconds_by_part,
    }


def row(point: Any) -> dict[str, Any]:
    rival = point.rival
    return {
        "m": point.m,
        "artifact_tok_s": point.artifact.output_throughput,
        "baseline_tok_s": point.baseline.output_throughput,
        "rival_tok_s": rival and rival.figures.output_throughput,
        "over_rival": rival and [rival.ratio_low, rival.ratio, rival.ratio_high],
        "over_baseline": [point.ratio_low, point.ratio, point.ratio_high],
        "blocks": len(point.log_ratios),
    }


if __name__ == "__main__":
    main()
