"""A quantize killed again and again: the result must be byte-identical, and nothing finished made twice.

    python -P tests/bench/quantization/resume.py CHECKPOINT --kills 20 --out OUT/resume.json
    python -P tests/bench/quantization/resume.py CHECKPOINT --kills 10 --recipe int4-gptq --calibration TEXT \
        --out OUT/resume_calibrated.json

Finished are shards, and of a calibrated job decoder layers and what the model has written.

Each kill is a SIGKILL at a random moment of the work, the start-up excluded; then the same command again.
"""

import argparse
import json
import random
import tempfile
import time
from pathlib import Path

from scalegate.serving_check.server.fork_server import Process, fork_server, start_process
from scalegate.tests.pipeline.quantization.forked_quantize import quantize_alone

CALIBRATION = ".scalegate-calibration"
IMPORTED = ("scalegate.pipeline.commands.quantize", "transformers.models.qwen3.modeling_qwen3")


def start(source: Path, asked: dict, out: Path) -> Process:
    """Begin a quantize in a process of its own: a fork of one that has done the imports, in `fork_server`."""
    options = {"out": out, "device": "cpu", "progress": False, **asked}
    return start_process(quantize_alone, source, options, name="quantize")[1]


def finish(child: Process) -> None:
    child.join()
    if child.exitcode:
        raise SystemExit(f"quantize failed with status {child.exitcode}")


def finished_files(out: Path) -> dict[str, int]:
    """Files that are finished, with their inodes: one made again has another."""
    if (out / "scalegate.json").exists():
        return shards_on_disk(out)
    return shards_on_disk(out) | {
        path.name: path.stat().st_ino for path in (out / CALIBRATION).glob("*.safetensors")
    }


def shards_on_disk(out: Path) -> dict[str, int]:
    """By name, the inode: a shard that has its name is finished, and stays."""
    return {path.name: path.stat().st_ino for path in out.glob("*.safetensors")}


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


def kill_and_resume(source: Path, asked: dict, kills: int, seed: int, folder: Path) -> dict:
    """asked: keyword arguments of `quantize`"""
    chance = random.Random(seed)
    whole, resumed = folder / "whole", folder / "resumed"
    finish(start(source, asked, folder / "warm-up"))
    began = time.perf_counter()
    finish(start(source, asked, whole))
    duration = time.perf_counter() - began
    # Moments that fall after the end kill nothing and do not count; after an end, the next one starts anew.
    redone: list[str] = []
    moments: list[float] = []
    layers: list[int] = []
    completed = 0
    while len(moments) < kills:
        before = finished_files(resumed) if resumed.exists() else {}
        child = start(source, asked, resumed)
        moment = chance.uniform(0.0, duration)
        child.join(moment)
        if child.exitcode is None:
            child.kill()
            child.join()
            moments.append(round(moment, 3))
        elif child.exitcode:
            raise SystemExit(f"quantize failed with status {child.exitcode}")
        after = finished_files(resumed)
        done = (resumed / "scalegate.json").exists()
        # The layers' files go when the artifact is whole.
        kept = {name: inode for name, inode in before.items() if not done or (resumed / name).exists()}
        redone += [name for name, inode in kept.items() if after.get(name) != inode]
        layers.append(len(after) - len(shards_on_disk(resumed)))
        if done:
            if differing := differing_files(whole, resumed):
                return {"differing": differing, "redone": redone, "kills": moments}
            if len(moments) < kills:
                completed += 1
                resumed = folder / f"resumed{completed}"
    finish(start(source, asked, resumed))
    return {
        "differing": differing_files(whole, resumed),
        "redone": redone,
        "kills": moments,
        **({"calibration_files_after_each": layers} if any(layers) else {}),
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
    parser.add_argument("--calibration", type=Path, help="a text, for recipes that read one")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--shard-bytes", type=int, default=300_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    asked = {"recipe": arguments.recipe, "max_shard_bytes": arguments.shard_bytes}
    asked |= {"calibration": arguments.calibration} if arguments.calibration else {}
    with tempfile.TemporaryDirectory() as folder, fork_server(IMPORTED):
        result = kill_and_resume(arguments.checkpoint, asked, arguments.kills, arguments.seed, Path(folder))
    result["holds"] = not result["differing"] and not result["redone"]
    print(json.dumps(result, indent=2))
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
