"""vLLM through `pipeline validate` on one or two GPUs: verdicts, servers that take turns, and its failures.

vLLM has to be on PATH or importable here. In calls of nine minutes, on one GPU and then on two:

    python -P tests/bench/gate/engines_gpu.py --only qwen3-8b failures --out OUT/engines_one.json
    python -P tests/bench/gate/engines_gpu.py --only turns --out OUT/engines_turns.json
    python -P tests/bench/gate/engines_gpu.py --only two-gpus tensor-parallel --out OUT/engines_two.json

Each row is a process of its own with a limit, and is printed and kept in `--out` as soon as it has ended;
whatever it leaves running is found by a mark in its environment, also where SIGTERM cuts the bench off. The
failures run four at a time and are not timed; GPU memory is compared after all of them, unless `--shared`
says that others use the GPUs meanwhile. The weights are those of `verdict_gpu.py` but for the bundled
checkpoint's, and lie in memory (`--folder`); with `--made` they are kept there, and taken from there where
another process has made them (`--only` with no row makes them alone). Servers take turns
with Qwen3-8B's shape: a group of blocks takes 40 seconds then, nearly all of them a start, and INT4 is soon
ahead. No row runs past `--seconds`. The table comes last; the logs of what went wrong are in `--logs`.
Exit status 1 where a row misses its bar.
"""

import argparse
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import stdev
from typing import Any

import psutil
import torch
from scalegate.base.atomic_files import write_json
from scalegate.base.untrusted_files import read_json_object
from scalegate.pipeline.records.artifact import MANIFEST_NAME
from scalegate.serving_check.adapters.prometheus_text import parse_metrics, total
from scalegate.serving_check.evidence.environment import describe_environment
from scalegate.tests.bench.gate.verdict_gpu import EXAMPLE, make_checkpoint

MARK, RUN = "ENGINES_GPU_ROW", uuid.uuid4().hex
RUNNING = "vllm:num_requests_running"
LEFT_MIB = 256
"""GPU memory that may differ between two readings with nothing left: a driver's own."""
DECIDED, UNUSABLE = (0, 1), (2,)
ENDING_SECONDS = 30
"""For a row past its limit to end what it has started."""
SERVER = [sys.executable, "-P", "-m", "vllm.entrypoints.cli.main"]
LOAD = "--m 1,8,32"
SMALL_LOAD = "--m 1 --quality-tokens 1024 --max-blocks 12"
TAKES_THE_PORT = """#!{python}
import os, socket, sys
port = int(sys.argv[sys.argv.index("--port") + 1])
taken = socket.create_server(("127.0.0.1", port))
os.set_inheritable(taken.fileno(), True)
os.execv({real!r}, [{real!r}, *sys.argv[1:]])
"""
STOPS = "#!/bin/sh\nkill -STOP $$\n"


@dataclass(frozen=True)
class Part:
    """One verdict that is wanted."""

    shape: str
    """The bundled checkpoint, or one of `random_qwen3.SHAPES`."""
    words: str
    bar: int
    """Seconds, at most."""
    gpus: int = 1
    must_say: str = ""
    """In what it prints."""


PARTS = {
    "example": Part("example", "", 240),
    "qwen3-8b": Part("qwen3-8b", "", 420),
    "turns": Part("qwen3-8b", '--engine-args "--gpu-memory-utilization 0.6"', 530, must_say="took turns"),
    "two-gpus": Part("example", "--devices 0,1", 240, gpus=2),
    "two-gpus-8b": Part("qwen3-8b", "--devices 0,1", 420, gpus=2),
    "tensor-parallel": Part("70b-16-layers", "--tensor-parallel-size 2", 420, gpus=2),
}
FAILURES = "failures"


@dataclass(frozen=True)
class Failure:
    """A way in which vLLM fails, and words of the one line that must tell of it."""

    words: str
    said: str
    artifact: str = "int4-hqq"
    command: str | None = None
    """In the place of `vllm`: a script."""
    kill: str | None = None
    """What is ended while it serves: the `server` itself, or its `EngineCore`."""


def failures(real: str) -> dict[str, Failure]:
    taken = TAKES_THE_PORT.format(python=sys.executable, real=real)
    # First what measures free memory, which no other may give back meanwhile, and what takes longest.
    return {
        "share too small": Failure('--engine-args "--gpu-memory-utilization 0.001"', "give more with"),
        "server killed": Failure("", "SIGKILL", kill="server"),
        "engine core killed": Failure("", "while it served", kill="EngineCore"),
        "hangs at start": Failure("--startup-timeout 30", "did not serve within 30 s", command=STOPS),
        "unknown quantization": Failure("", "--engine embedded", artifact="iq2-xxs"),
        "unknown word": Failure('--engine-args "--no-such-word 1"', "check --engine-args"),
        "port taken": Failure("", "took the port", command=taken),
        "out of memory": Failure('--engine-args "--kv-cache-memory-bytes 4000000000000"', "out of memory"),
        "share not free": Failure('--engine-args "--gpu-memory-utilization 0.999"', "Free memory on device"),
    }


@dataclass
class Row:
    name: str
    status: int | None
    """The exit status; None where it ran past its limit."""
    seconds: float
    said: str
    """Its last line."""
    held: bool
    left: list[str] = field(default_factory=list)
    """Processes that it left running; they are ended then."""
    gpu_mib_left: int | None = None
    verdict: dict[str, Any] | None = None


def main() -> None:
    options = arguments()
    signal.signal(signal.SIGTERM, lambda *_: (end_marked(RUN), os._exit(128 + signal.SIGTERM)))
    options.logs.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    for shape in options.make:
        made(shape, options.made / shape, options.device)
    with tempfile.TemporaryDirectory(dir=options.folder) as work:
        folder = Path(work)
        real = shutil.which("vllm") or script(folder / "vllm", f'#!/bin/sh\nexec {shlex.join(SERVER)} "$@"\n')
        sources: dict[str, Path] = {}
        for name in options.only:
            if name == FAILURES:
                rows += all_failures(folder, real, options)
                keep(rows, options)
                continue
            part = PARTS[name]
            if options.made is not None:
                sources[part.shape] = made(part.shape, options.made / part.shape, options.device)
            elif part.shape not in sources:
                for other in sources.values():
                    shutil.rmtree(other)
                sources = {part.shape: made(part.shape, folder / part.shape, options.device)}
            rows.append(one_verdict(name, part, sources[part.shape], real, options))
            say(line_of(rows[-1]))
            keep(rows, options)
    show(rows)
    sys.exit(not all(row.held for row in rows))


def keep(rows: Sequence[Row], options: argparse.Namespace) -> None:
    if options.out is None:
        return
    result = {
        "environment": vars(describe_environment(options.device, "auto", "vllm", "vllm")),
        "gpus": torch.cuda.device_count(),
        "rows": [asdict(row) for row in rows],
    }
    write_json(options.out, result)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", choices=[*PARTS, FAILURES], default=["example", FAILURES])
    parser.add_argument("--cases", nargs="+", help="of the failures, these; default all")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"), help="where the checkpoints lie")
    parser.add_argument("--made", type=Path, help="a folder to keep checkpoints in, and to take them from")
    parser.add_argument("--make", nargs="+", default=[], help="first make these shapes, in --made")
    parser.add_argument("--shared", action="store_true", help="others use the GPUs meanwhile")
    parser.add_argument("--seconds", type=float, default=math.inf, help="from now, for all rows")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--logs", type=Path, default=Path(tempfile.gettempdir()) / "engines_gpu")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.make and options.made is None:
        parser.error("--make needs --made")
    options.ends = time.monotonic() + options.seconds
    return options


def made(shape: str, folder: Path, device: str) -> Path:
    """A folder with `source`, and the INT4 artifact made of it; taken as it is where both are there."""
    if (folder / "int4-hqq" / MANIFEST_NAME).is_file():
        return folder
    if shape == "example":
        shutil.copytree(EXAMPLE, folder / "source")
    else:
        make_checkpoint(shape, folder / "source", device)
    return quantized(folder, "int4-hqq", device)


def quantized(folder: Path, recipe: str, device: str) -> Path:
    words = [folder / "source", "--recipe", recipe, "--out", folder / recipe, "--device", device]
    started = time.monotonic()
    subprocess.run(
        [sys.executable, "-P", "-m", "scalegate.pipeline", "quantize", *map(str, words)], check=True
    )
    say(f"quantize {recipe} {time.monotonic() - started:.1f} s")
    return folder


def one_verdict(name: str, part: Part, folder: Path, real: str, options: argparse.Namespace) -> Row:
    report = options.logs / f"{name}-report"
    words = f"{LOAD} {part.words} --report {shlex.quote(str(report))}"
    before = gpu_mib_used()
    row, printed = validate(name, folder / "int4-hqq", words, real, part.bar, options)
    row.gpu_mib_left = None if options.shared else gpu_mib_used() - before
    verdict = report / "serving_check.json"
    if verdict.is_file():
        row.verdict = told(read_json_object(verdict))
    decided = row.status in DECIDED and row.verdict is not None
    row.held = decided and part.must_say in printed and not row.left and (row.gpu_mib_left or 0) < LEFT_MIB
    return row


def told(verdict: dict[str, Any]) -> dict[str, Any]:
    return {
        "status": verdict["status"],
        "parts": verdict["seconds_by_part"],
        "checks": {check["name"]: [check["status"], check["reason"]] for check in verdict["checks"]},
        "ratios": {
            point["m"]: [point["ratio"], point["ratio_low"], point["ratio_high"], len(point["log_ratios"])]
            for point in verdict["curve"]
        },
        # What a 95% interval's width follows from, whenever the blocks were enough.
        "spread": {
            point["m"]: stdev(point["log_ratios"])
            for point in verdict["curve"]
            if len(point["log_ratios"]) > 1
        },
    }


def all_failures(work: Path, real: str, options: argparse.Namespace) -> list[Row]:
    folder = made("example", work / "failures", options.device)
    quantized(folder, "iq2-xxs", options.device)
    chosen = {
        name: failure
        for name, failure in failures(real).items()
        if not options.cases or name in options.cases
    }
    before = gpu_mib_used()

    def fail(name: str, failure: Failure) -> Row:
        command = real if failure.command is None else script(work / name / "vllm", failure.command)
        words = f"{SMALL_LOAD} {failure.words}"
        watch = None if failure.kill is None else killer(failure.kill)
        row, printed = validate(name, folder / failure.artifact, words, command, 240, options, watch)
        one_line = failure.said in row.said and "Traceback" not in printed
        row.held = row.status in UNUSABLE and one_line and not row.left
        say(line_of(row))
        return row

    with ThreadPoolExecutor(4) as threads:
        rows = list(threads.map(fail, chosen, chosen.values()))
    if options.shared:
        return rows
    left = gpu_mib_used() - before
    return [*rows, Row("GPU memory after all failures", None, 0.0, "", left < LEFT_MIB, [], left)]


def validate(
    name: str,
    artifact: Path,
    words: str,
    vllm: str,
    limit: float,
    options: argparse.Namespace,
    watch: Callable[[str], bool] | None = None,
) -> tuple[Row, str]:
    """Run the command in a process of its own; the row, and all that was printed.

    vllm:  the command that `vllm` is to be
    watch: called with the row's mark until it says that it is done
    """
    mark = f"{RUN} {uuid.uuid4().hex}"
    environment = os.environ | {MARK: mark, "PATH": f"{Path(vllm).parent}:{os.environ['PATH']}"}
    command = [sys.executable, "-P", "-m", "scalegate.pipeline", "validate", str(artifact)]
    device = [] if "--devices" in words else ["--device", options.device]
    command += ["--engine", "vllm", *device, *shlex.split(words)]
    log = options.logs / f"{name.replace(' ', '-')}.log"
    say(f"{name}: {shlex.join(command[3:])}")
    started, ended = time.monotonic(), threading.Event()
    with open(log, "wb") as file:
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=file, start_new_session=True)
        watcher = threading.Thread(target=_watch, args=(watch, mark, ended)) if watch else None
        if watcher is not None:
            watcher.start()
        status: int | None = None
        try:
            status = process.wait(max(0.0, min(limit, options.ends - started)))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(ENDING_SECONDS)
        ended.set()
        if watcher is not None:
            watcher.join()
    seconds = time.monotonic() - started
    left = end_marked(mark)
    process.wait()
    printed = log.read_text(encoding="utf-8", errors="replace")
    lines = [line.strip() for line in printed.replace("\r", "\n").splitlines() if line.strip()]
    return Row(name, status, round(seconds, 1), lines[-1] if lines else "", False, left), printed


def _watch(watch: Callable[[str], bool], mark: str, ended: threading.Event) -> None:
    while not watch(mark) and not ended.wait(0.5):
        pass


def killer(what: str) -> Callable[[str], bool]:
    """Ends a server of the row with that mark as soon as it answers requests."""

    def watch(mark: str) -> bool:
        for supervisor in marked(mark):
            with _gone():
                words = supervisor.cmdline()
                if not words[3:] or not words[3].endswith("supervisor.py") or "--port" not in words:
                    continue
                if not is_answering(words[words.index("--port") + 1]):
                    continue
                (server,) = supervisor.children()
                workers = [
                    child for child in server.children(recursive=True) if what in " ".join(child.cmdline())
                ]
                for victim in [server] if what == "server" else workers:
                    say(f"SIGKILL to {' '.join(victim.cmdline())[:80]}")
                    victim.kill()
                return True
        return False

    return watch


def is_answering(port: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=2) as answer:
            return (total(parse_metrics(answer.read().decode()), RUNNING) or 0) > 0
    except OSError:
        return False


class _gone:
    """Processes that end while they are looked at are nobody's concern."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        return kind is not None and issubclass(kind, psutil.Error)


def marked(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with _gone():
            is_marked = process.environ().get(MARK, "").startswith(mark)
            if is_marked and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def end_marked(mark: str) -> list[str]:
    """What still runs of a row; ended."""
    left = []
    for process in marked(mark):
        with _gone():
            left.append(" ".join(process.cmdline())[:120])
            process.kill()
    return left


def gpu_mib_used() -> int:
    """On all GPUs, by anybody."""
    if not torch.cuda.is_available():
        return 0
    torch.cuda.empty_cache()
    memory = [torch.cuda.mem_get_info(device) for device in range(torch.cuda.device_count())]
    return sum(total - free for free, total in memory) >> 20


def script(path: Path, text: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)
    return str(path)


def say(text: str) -> None:
    """One write: threads say things at the same time."""
    sys.stdout.write(f"== {text}\n")
    sys.stdout.flush()


def show(rows: Sequence[Row]) -> None:
    print(f"\n{'':>4} {'row':<30} {'exit':>4} {'s':>6} {'left':>4} {'MiB':>5}  what it says")
    for row in rows:
        print(line_of(row))


def line_of(row: Row) -> str:
    mib = "" if row.gpu_mib_left is None else row.gpu_mib_left
    status = "" if row.status is None else row.status
    said = row.said if row.verdict is None else ratios(row.verdict)
    held = "ok" if row.held else "MISS"
    return (
        f"{held:>4} {row.name:<30} {status:>4} {row.seconds:>6.0f} {len(row.left):>4} {mib:>5}  {said[:300]}"
    )


def ratios(verdict: dict[str, Any]) -> str:
    text = ", ".join(
        f"M={m} {ratio:.3f} [{low:.3f}, {high:.3f}], {high / low:.3f}× wide, of {blocks} blocks "
        f"that spread {verdict['spread'].get(m, math.nan):.1%}"
        for m, (ratio, low, high, blocks) in verdict["ratios"].items()
        if None not in (ratio, low, high)
    )
    failed = [name for name, (status, _) in verdict["checks"].items() if status not in ("pass", "skipped")]
    return f"{verdict['status']}: {text}" + (f"; not passed: {', '.join(failed)}" if failed else "")


if __name__ == "__main__":
    main()
