"""A quantize killed again and again: the result must be byte-identical, and no finished shard made twice.

    python -P tests/bench/resume.py CHECKPOINT --kills 20 --out tests/bench/results/resume.json

Each kill is a SIGKILL at a random moment of the work, the start-up excluded; then the same command again.
"""

import argparse
import json
import multiprocessing
import random
import tempfile
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

from scalegate.pipeline.quantize import quantize

PARTS, FINISHED = ".scalegate-parts", ".finished.json"


def start(source: Path, recipe: str, out: Path, shard_bytes: int) -> BaseProcess:
    """Begin a quantize in a process of its own, forked from a server that has done the imports."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["scalegate.pipeline.quantize", "transformers.models.qwen3.modeling_qwen3"]
    )
    options = {"max_shard_bytes": shard_bytes, "device": "cpu", "progress": False}
    child = context.Process(target=quantize, args=(source, recipe, out), kwargs=options)
    child.start()
    return child


def finish(child: BaseProcess) -> None:
    child.join()
    if child.exitcode:
        raise SystemExit(f"quantize failed with status {child.exitcode}")


def finished_shards(out: Path) -> dict[str, int]:
    """The shards the work record calls finished, with their files' inodes: a shard made again has another."""
    if not (out / PARTS).is_dir():
        return {path.name: path.stat().st_ino for path in out.glob("*.safetensors")}
    names = [path.name.removesuffix(FINISHED) for path in (out / PARTS).glob(f"*{FINISHED}")]
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
    finish(start(source, recipe, folder / "warm-up", shard_bytes))
    began = time.perf_counter()
    finish(start(source, recipe, whole, shard_bytes))
    duration = time.perf_counter() - began
    # Moments that fall after the end kill nothing and do not count; after an end, the next one starts anew.
    redone: list[str] = []
    moments: list[float] = []
    completed = 0
    while len(moments) < kills:
        before = finished_shards(resumed) if resumed.exists() else {}
        child = start(source, recipe, resumed, shard_bytes)
        moment = chance.uniform(0.0, duration)
        child.join(moment)
        if child.exitcode is None:
            child.kill()
            child.join()
            moments.append(round(moment, 3))
        elif child.exitcode:
            raise SystemExit(f"quantize failed with status {child.exitcode}")
        after = finished_shards(resumed)
        redone += [name for name, inode in before.items() if after.get(name) != inode]
        if (resumed / "scalegate.json").exists():
            if differing := differing_files(whole, resumed):
                return {"differing": differing, "redone": redone, "kills": moments}
            if len(moments) < kills:
                completed += 1
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
    parser.add_argument("--shard-bytes", type=int, default=300_000)
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
