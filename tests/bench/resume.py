"""A quantize killed again and again: the result must be byte-identical, and no finished shard made twice.

    python -P tests/bench/resume.py CHECKPOINT --kills 20 --out tests/bench/results/resume.json

Each kill is a SIGKILL at a random moment of the work, the start-up excluded; then the same command again.
"""

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CHILD = """
import sys
from scalegate.pipeline.quantize import quantize
from scalegate.pipeline import skeleton
print("ready", flush=True)
source, recipe, out, shard_bytes = sys.argv[1:]
quantize(source, recipe, out, max_shard_bytes=int(shard_bytes), device="cpu", progress=False)
"""
RECORD = ".scalegate-quantize.json"


def start(source: Path, recipe: str, out: Path, shard_bytes: int) -> subprocess.Popen:
    """Begin a quantize in a process of its own; returns when its imports are done."""
    command = [sys.executable, "-P", "-c", CHILD, str(source), recipe, str(out), str(shard_bytes)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if child.stdout is None or child.stdout.readline().strip() != "ready":
        raise SystemExit(f"the child did not start: {child.communicate()[1]}")
    return child


def finish(child: subprocess.Popen) -> None:
    _, errors = child.communicate()
    if child.returncode:
        raise SystemExit(f"quantize failed with status {child.returncode}:\n{errors}")


def finished_shards(out: Path) -> dict[str, int]:
    """The shards the work record calls finished, with their files' inodes: a shard made again has another."""
    try:
        names = json.loads((out / RECORD).read_text())["shards"]
    except FileNotFoundError:
        return {path.name: path.stat().st_ino for path in out.glob("*.safetensors")}
    return {name: (out / name).stat().st_ino for name in names}


def differing_files(a: Path, b: Path) -> list[str]:
    names = sorted({path.relative_to(root).as_posix() for root in (a, b) for path in root.rglob("*")})
    return [
        name
        for name in names
        if not (
            (a / name).is_file()
            and (b / name).is_file()
            and (a / name).read_bytes() == (b / name).read_bytes()
        )
    ]


def kill_and_resume(source: Path, recipe: str, kills: int, shard_bytes: int, seed: int, folder: Path) -> dict:
    chance = random.Random(seed)
    whole, resumed = folder / "whole", folder / "resumed"
    begin = start(source, recipe, whole, shard_bytes)
    began = time.perf_counter()
    finish(begin)
    duration = time.perf_counter() - began
    # Moments that fall after the end kill nothing and do not count; after an end, the next one starts anew.
    redone: list[str] = []
    moments: list[float] = []
    completed = 0
    while len(moments) < kills:
        before = finished_shards(resumed) if resumed.exists() else {}
        child = start(source, recipe, resumed, shard_bytes)
        moment = chance.uniform(0.0, duration)
        try:
            child.wait(moment)
        except subprocess.TimeoutExpired:
            child.send_signal(signal.SIGKILL)
            child.communicate()
            moments.append(round(moment, 3))
            if (resumed / "scalegate.json").exists():
                # Killed after the last write: whole it must be.
                completed += 1
        else:
            finish(child)
            completed += 1
        after = finished_shards(resumed)
        redone += [name for name, inode in before.items() if after.get(name) != inode]
        if (resumed / "scalegate.json").exists():
            if differing := differing_files(whole, resumed):
                return {"differing": differing, "redone": redone, "kills": moments}
            if len(moments) < kills:
                resumed = folder / f"resumed{completed}"
    finish(start(source, recipe, resumed, shard_bytes))
    return {
        "differing": differing_files(whole, resumed),
        "redone": redone,
        "kills": moments,
        "completed_on_the_way": completed,
        "shards": len(list(whole.glob("*.safetensors"))),
        "uninterrupted_seconds": duration,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--recipe", default="int4-hqq")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--shard-bytes", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = kill_and_resume(
            arguments.checkpoint,
            arguments.recipe,
            arguments.kills,
            arguments.shard_bytes,
            arguments.seed,
            Path(folder),
        )
    result["holds"] = not result["differing"] and not result["redone"]
    print(json.dumps(result, indent=2))
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
