"""A release as on an older GPU: the chooser's own layout, and tinygemm, which the gate must catch.

    python -P tests/bench/gate/older_gpu_release.py --folder /dev/shm --out OUT/older_gpu_release.json
    python -P tests/bench/gate/older_gpu_release.py --as 8.9 --m 1,32 --only tinygemm --out OUT/tinygemm.json

Every process, servers included, compiles for the older GPU, and the driver of a Hopper GPU translates. The
weights are random, as `verdict_gpu.py` makes them, and the recipe is the default one. cuBLAS, which serves
the baseline, runs as on Hopper. The second release finds what the first has quantized. Exit status 1 if the
first does not pass with a layout of ours, or if the second does not fail, naming tinygemm. The recorded two
were made in calls of their own.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from scalegate.base.atomic_files import write_json
from scalegate.tests.bench.gate.verdict_gpu import make_checkpoint
from scalegate.tests.bench.random_qwen3 import SHAPES

RECIPE = "int4-symmetric"
OURS, CAUGHT = "int4_portable", "tinygemm"
RELEASES = {"chosen": [], CAUGHT: ["--layout", CAUGHT]}
"""Words for `pipeline release`."""
EVERY_PROCESS = """from scalegate.tests.bench.kernels.older_gpu import pretend

pretend({major}, {minor})
"""
"""Python runs a file with the name `sitecustomize.py` whenever it starts."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--as", dest="capability", default="8.0")
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b-8-layers")
    parser.add_argument("--m", default="1,8,32,64")
    parser.add_argument("--only", choices=RELEASES, help="one of the two releases: each takes minutes")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"), help="where the checkpoints lie")
    parser.add_argument("--device", default="cuda", help="cpu pretends nothing: a trial of this script")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    results: dict[str, Any] = {"as": options.capability, "shape": options.shape, "ms": options.m}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        work = Path(folder)
        environment = dict(os.environ)
        if options.device == "cuda":
            major, minor = options.capability.split(".")
            (work / "sitecustomize.py").write_text(EVERY_PROCESS.format(major=major, minor=minor))
            environment["PYTHONPATH"] = os.pathsep.join([str(work), environment.get("PYTHONPATH", "")])
        source = work / options.shape
        make_checkpoint(options.shape, source, options.device)
        for name, words in RELEASES.items():
            if options.only in (None, name):
                results[name] = release(source, work, [*words, "--m", options.m], options, environment)
                print(f"== {name}: {json.dumps(results[name])}", flush=True)
                write_json(options.out, results)
    is_right = {"chosen": passed_with_ours, CAUGHT: failed_by_name}
    sys.exit(not all(is_right[name](results[name]) for name in RELEASES if name in results))


def passed_with_ours(result: dict[str, Any]) -> bool:
    return result["verdict"] == "pass" and set(result["layouts"]) == {OURS}


def failed_by_name(result: dict[str, Any]) -> bool:
    return result["verdict"] == "fail" and any(CAUGHT in reason for reason in result["failed"].values())


def release(
    source: Path, work: Path, words: list[str], options: argparse.Namespace, environment: dict[str, str]
) -> dict[str, Any]:
    """What the release took and said."""
    started = time.monotonic()
    artifact = work / "artifacts" / f"{source.name}-{RECIPE}"
    command = [sys.executable, "-P", "-m", "scalegate.pipeline", "release", str(source), "--recipe", RECIPE]
    command += ["--work", str(artifact.parent), "--to", f"folder:{work / 'release'}"]
    command += ["--device", options.device, *words]
    status = subprocess.run(command, env=environment, check=False).returncode
    seconds = time.monotonic() - started
    manifest = json.loads((artifact / "scalegate.json").read_text(encoding="utf-8"))
    verdict = json.loads((artifact / "serving_check.json").read_text(encoding="utf-8"))
    return {
        "status": status,
        "seconds": round(seconds, 1),
        "layouts": [choice["layout"] for choice in manifest["layout_plan"]["choices"]],
        "verdict": verdict["status"],
        "ratios": {point["m"]: point["ratio"] for point in verdict["curve"]},
        "failed": {c["name"]: c["reason"] for c in verdict["checks"] if c["status"] != "pass"},
    }


if __name__ == "__main__":
    main()
