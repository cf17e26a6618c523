"""Quantizing on one, two and four GPUs under torchrun: how much faster, and whether the bytes are the same.

On a machine with so many GPUs, in one call of nine minutes:

    python -P tests/bench/quantization/distributed_quantize.py --gpus 1 2 --out OUT/distributed_2.json
    python -P tests/bench/quantization/distributed_quantize.py --gpus 1 2 4 --out OUT/distributed_4.json

Weights of Qwen3-32B's shapes are drawn on the GPU into files in memory, so no disk is timed; `--layers` cuts
them. `--parts` chooses: `speed` quantizes all of them on each number of GPUs; `resume` a cut of
`--resume-layers` by two processes of which one is killed, and finishes it on one GPU; `make` writes the
weights to `--source` alone, where `speed` then takes them from. What no longer fits into `--seconds` is left
out and said. The seconds are those of `quantize`, without Python's imports; those of
the whole command stand beside them. Each result is printed and kept as soon as it is there; the table comes
last. Exit status 1 where bytes differ or a speed-up misses its bar.
"""

import argparse
import atexit
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import torch
from scalegate.base.atomic_files import write_json
from scalegate.pipeline.checkpoints.checkpoint import INDEX_NAME
from scalegate.pipeline.commands.quantize import MAX_SHARD_BYTES, quantize
from scalegate.pipeline.machine.cores import available_cores
from scalegate.pipeline.quantization.shards.work_record import FINISHED_SUFFIX, PARTS_FOLDER
from scalegate.pipeline.records.artifact import MANIFEST_NAME, Artifact
from scalegate.serving_check.evidence.environment import describe_environment
from scalegate.tests.bench.quantization.sharded_weights import (
    SHARD_BYTES,
    WRITERS,
    bytes_of,
    weights_of,
    write_weights,
)
from scalegate.tests.bench.random_qwen3 import SHAPES
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

SHAPE = "qwen3-32b"
BARS = {2: 1.8, 4: 3.4}
SECONDS_NAME = "seconds.json"
MAKE, SPEED, RESUME = "make", "speed", "resume"
ARTIFACTS_SHARE = 0.3
"""Of the source's bytes: what an artifact takes, at most."""
SLACK = 1.5
"""A run may take so many times its share of the first one's time."""
KILLED_AFTER = 2
"""Finished shards, before one of the processes is killed."""


def main() -> None:
    options = arguments()
    if options.rank_of is not None:
        one_rank(*options.rank_of, options)
        return
    signal.signal(signal.SIGTERM, cut_off)
    began = time.monotonic()
    result: dict[str, Any] = {
        "environment": vars(describe_environment(options.device, "auto", "none", "none")),
        "shape": f"{SHAPE} cut to {options.layers} of {SHAPES[SHAPE]['num_hidden_layers']} layers",
        "recipe": options.recipe,
    }
    with tempfile.TemporaryDirectory(dir=options.folder) as work:
        folder = Path(work)
        source = options.source or folder / "source"
        if {MAKE, SPEED} & set(options.parts):
            result["source_bytes"] = source_made(source, folder, options)
        if SPEED in options.parts:
            result["runs"] = []
            for row in runs(source, folder, options, began):
                result["runs"].append(row)
                keep(result, options)
            shutil.rmtree(source)
        if RESUME in options.parts:
            made(folder / "cut", options.resume_layers, options)
            result["resume"] = kill_and_resume(folder, options)
            keep(result, options)
    sys.exit(not show(result))


def keep(result: dict[str, Any], options: argparse.Namespace) -> None:
    if options.out is not None:
        write_json(options.out, result)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=[MAKE, SPEED, RESUME], default=[SPEED, RESUME])
    parser.add_argument("--source", type=Path, help="where the weights are kept between two calls")
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--layers", type=int, default=SHAPES[SHAPE]["num_hidden_layers"])
    parser.add_argument("--resume-layers", type=int, default=6)
    parser.add_argument("--recipe", default="int4-hqq")
    parser.add_argument("--device", default="cuda", help="cpu tries the script out")
    parser.add_argument("--seconds", type=float, default=520)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"), help="where the checkpoints lie")
    parser.add_argument("--width", type=int, default=1, help="a divisor of the shapes, to try the script out")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rank-of", type=Path, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if MAKE in options.parts and options.source is None:
        parser.error("--parts make needs --source")
    return options


def source_made(source: Path, folder: Path, options: argparse.Namespace) -> int:
    """The bytes of the weights to quantize; they are made where they are not there, and so is room."""
    index = source / INDEX_NAME
    if index.is_file():
        return int(json.loads(index.read_text(encoding="utf-8"))["metadata"]["total_size"])
    source_bytes = made(source, options.layers, options)
    touch(folder, source_bytes)
    return source_bytes


def made(folder: Path, layers: int, options: argparse.Namespace) -> int:
    """A checkpoint of random weights in shards of 4 GiB; its bytes."""
    started = time.monotonic()
    folder.mkdir()
    narrow = ("hidden_size", "intermediate_size", "vocab_size")
    sizes = {**SHAPES[SHAPE], "num_hidden_layers": layers}
    sizes |= {name: sizes[name] // options.width for name in narrow}
    config = Qwen3Config(**sizes, architectures=["Qwen3ForCausalLM"], dtype="bfloat16")
    config.save_pretrained(folder)
    with torch.device("meta"):
        weights = weights_of(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16))

    def drawn(weight: Tensor) -> Tensor:
        return torch.empty_like(weight, device=options.device).normal_(std=0.02)

    shards = write_weights(folder, weights, drawn, SHARD_BYTES // options.width**2)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    total = bytes_of(weights)
    say(f"{total / 1e9:.1f} GB of weights in {shards} shards: {time.monotonic() - started:.0f} s")
    return total


def touch(folder: Path, source_bytes: int) -> None:
    """Take the memory that two artifacts will lie in, once: a virtual machine may get it only when it is
    first written, and no run is to wait for that."""
    started = time.monotonic()
    zeros = bytes(64 << 20)
    count = int(2 * ARTIFACTS_SHARE * source_bytes) // len(zeros) // WRITERS

    def write(number: int) -> None:
        with open(folder / f"touched-{number}", "wb") as file:
            for _ in range(count):
                file.write(zeros)

    with ThreadPoolExecutor(WRITERS) as threads:
        list(threads.map(write, range(WRITERS)))
    for number in range(WRITERS):
        (folder / f"touched-{number}").unlink()
    say(f"memory taken: {time.monotonic() - started:.0f} s")


def one_rank(source: Path, out: Path, options: argparse.Namespace) -> None:
    started = time.monotonic()
    # Without an index, so that each process takes its own GPU of the machine's.
    quantize(
        source,
        options.recipe,
        out,
        device=options.device,
        max_shard_bytes=MAX_SHARD_BYTES // options.width**2,
    )
    if os.environ["RANK"] == "0":
        write_json(out.with_name(f"{out.name}-{SECONDS_NAME}"), time.monotonic() - started)


def torchrun(count: int, source: Path, out: Path, options: argparse.Namespace) -> subprocess.Popen[bytes]:
    words = ["--rank-of", source, out, "--recipe", options.recipe, "--device", options.device]
    words += ["--width", options.width]
    command = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone"]
    # Left out, it is the machine's name, which need not be known on one without a network.
    command += ["--local-addr", "127.0.0.1"]
    command += ["--nproc-per-node", str(count), __file__, *map(str, words)]
    threads = str(max(1, available_cores() // count))
    job = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": threads})
    atexit.register(end, job)
    return job


def cut_off(*_: object) -> None:
    # timeout sends it twice, and what is cleaned up meanwhile is not to stop halfway.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(128 + signal.SIGTERM)


def end(job: subprocess.Popen[bytes]) -> None:
    """Where the bench is cut off; torchrun ends its processes."""
    if job.poll() is None:
        job.terminate()
        job.wait(60)


def kill_and_resume(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """One of two processes killed, and the rest done by one: the bytes against those of one alone."""
    source, whole, out = folder / "cut", folder / "whole", folder / "resumed"
    finish(torchrun(1, source, whole, options))
    job = torchrun(2, source, out, options)
    parts = out / PARTS_FOLDER
    while len(list(parts.glob(f"*{FINISHED_SUFFIX}"))) < KILLED_AFTER and job.poll() is None:
        time.sleep(0.02)
    killed_at = time.monotonic()
    for process in psutil.Process(job.pid).children(recursive=True):
        if process.environ().get("RANK") == "1":
            process.send_signal(signal.SIGKILL)
    status = job.wait(120)
    ended = time.monotonic() - killed_at
    kept = {path.name: path.stat().st_ino for path in out.glob("*.safetensors")}
    finish(torchrun(1, source, out, options))
    again = {path.name: path.stat().st_ino for path in out.glob("*.safetensors")}
    found = {
        "layers": options.resume_layers,
        "status_of_torchrun": status,
        "seconds_until_all_had_ended": round(ended, 1),
        "shards": len(again),
        "finished_before": len(kept),
        "made_again": sum(again[name] != inode for name, inode in kept.items()),
        "equal": equal(whole, out),
    }
    for target in (whole, out):
        shutil.rmtree(target)
    say(f"killed and resumed: {found}")
    return found


def runs(source: Path, folder: Path, options: argparse.Namespace, began: float) -> Iterator[dict[str, Any]]:
    """The whole checkpoint on each number of GPUs; artifacts are compared and not kept."""
    first = folder / "on-one"
    on_one = 0.0
    for count in options.gpus:
        left = options.seconds - (time.monotonic() - began)
        if left < SLACK * on_one / count:
            yield {"gpus": count, "left_out": f"{left:.0f} s were left"}
            continue
        out = folder / f"on-{count}" if first.exists() else first
        started = time.monotonic()
        finish(torchrun(count, source, out, options))
        whole = time.monotonic() - started
        on_one = on_one or whole * count
        seconds = json.loads(out.with_name(f"{out.name}-{SECONDS_NAME}").read_text(encoding="utf-8"))
        same = out == first or equal(first, out)
        say(f"{count} GPUs: {seconds:.1f} s, {whole:.1f} s with the start, bytes equal: {same}")
        yield {"gpus": count, "seconds": seconds, "command_seconds": whole, "equal": same}
        if out != first:
            shutil.rmtree(out)


def finish(job: subprocess.Popen[bytes]) -> None:
    if job.wait():
        raise SystemExit(f"quantize ended with status {job.returncode}")


def equal(first: Path, other: Path) -> bool:
    """The same manifest, and of the second the very bytes that it records."""
    same = (first / MANIFEST_NAME).read_bytes() == (other / MANIFEST_NAME).read_bytes()
    return same and not Artifact.read(other).changed_files(other)


def say(text: str) -> None:
    print(f"== {text}", flush=True)


def show(result: dict[str, Any]) -> bool:
    """Whether all holds."""
    holds = True
    if "runs" in result:
        holds = show_runs(result)
    if "resume" in result:
        resume = result["resume"]
        holds = holds and resume["equal"] and resume["made_again"] == 0
        print(
            f"one of two killed after {resume['finished_before']} of {resume['shards']} shards, all ended "
            f"within {resume['seconds_until_all_had_ended']} s; finished on one GPU: "
            f"{'equal' if resume['equal'] else 'DIFFERENT'} bytes, {resume['made_again']} shards made again"
        )
    return bool(holds)


def show_runs(result: dict[str, Any]) -> bool:
    print(f"\n{result['shape']}, {result['source_bytes'] / 1e9:.1f} GB, {result['recipe']}, no disk")
    print("GPUs  seconds   GB/s  speed-up  bar  with start  bytes")
    holds, base = True, result["runs"][0]
    for row in result["runs"]:
        if "left_out" in row:
            print(f"{row['gpus']:>4}  left out: {row['left_out']}")
            continue
        speedup = base["seconds"] / row["seconds"]
        bar = BARS.get(row["gpus"])
        holds = holds and row["equal"] and (bar is None or speedup >= bar)
        print(
            f"{row['gpus']:>4} {row['seconds']:>8.1f} {result['source_bytes'] / row['seconds'] / 1e9:>6.2f}"
            f" {speedup:>8.2f}× {bar or '':>4} {base['command_seconds'] / row['command_seconds']:>10.2f}×"
            f"  {'equal' if row['equal'] else 'DIFFER'}"
        )
    return bool(holds)


if __name__ == "__main__":
    main()
