"""Runs many jobs side by side, each on cores of its own, and writes down how each ended as it ends.

    python -P tests/bench/lanes.py JOBS --out OUT --seconds 500 [--cores 2] [--done EARLIER.jsonl]

JOBS is a text file. A line is one job, `NAME: COMMAND`, for bash; `NAME *20: …` stands for twenty, in which
$RUN counts from 1, `NAME +cuda: …` for one that may use the GPU and gets twice the cores. They are begun in
the file's order, in an empty folder each. OUT/lanes.jsonl gets a line a job; those that stand in EARLIER are
left out, which is how a run that was cut short goes on. A short table comes last.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import IO

LINE = re.compile(r"(?P<name>[\w-]+)(?: \*(?P<runs>\d+))?(?P<cuda> \+cuda)?: (?P<command>.+)")
POLL_S = 0.2
KEPT_CHARACTERS = 40_000
SHOWN_LINES = 4
CUT_SHORT = -1


@dataclass(frozen=True)
class Job:
    name: str
    run: int
    command: str
    cuda: bool

    @property
    def lanes(self) -> int:
        return 2 if self.cuda else 1


@dataclass
class RunningJob:
    job: Job
    cores: list[int]
    process: subprocess.Popen
    log: IO[str]
    folder: tempfile.TemporaryDirectory
    started: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class JobResult:
    name: str
    run: int
    status: int
    """As the process ended; `CUT_SHORT` where time was up."""
    seconds: float
    cores: list[int]
    command: str
    output: str
    """Standard output and error, their end."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("jobs", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="for all of it")
    parser.add_argument("--cores", type=int, default=2, help="of a job")
    parser.add_argument("--done", type=Path, nargs="*", default=[])
    parser.add_argument("--only", nargs="+", metavar="NAME")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    results = options.out / "lanes.jsonl"
    before = [result for path in (*options.done, results) if path.exists() for result in read(path)]
    done = {(result.name, result.run) for result in before if result.status != CUT_SHORT}
    jobs = [
        job
        for job in read_jobs(options.jobs.read_text(encoding="utf-8"))
        if (job.name, job.run) not in done and (options.only is None or job.name in options.only)
    ]
    ended = []
    with results.open("a", encoding="utf-8") as file:
        for result in run(jobs, lanes_of(options.cores), time.monotonic() + options.seconds):
            ended.append(result)
            print(json.dumps(asdict(result)), file=file, flush=True)
            print(f"{result.name} {result.run}: status {result.status}, {result.seconds} s", flush=True)
            if result.status:
                print(
                    *("    " + line for line in result.output.splitlines()[-SHOWN_LINES:]),
                    sep="\n",
                    flush=True,
                )
    print(table(jobs, ended))


def read_jobs(text: str) -> list[Job]:
    jobs = []
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        found = LINE.fullmatch(line)
        if found is None:
            raise SystemExit(f"no job: {line}")
        runs = range(1, int(found["runs"] or 1) + 1)
        jobs += [Job(found["name"], run, found["command"], bool(found["cuda"])) for run in runs]
    return jobs


def read(path: Path) -> list[JobResult]:
    return [JobResult(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def lanes_of(cores: int) -> list[list[int]]:
    """The cores that this process may use, in groups; what is left over stays unused."""
    all_cores = sorted(os.sched_getaffinity(0))
    return [all_cores[first : first + cores] for first in range(0, len(all_cores) - cores + 1, cores)]


def run(jobs: Sequence[Job], lanes: list[list[int]], ends: float) -> Iterator[JobResult]:
    """Each job as it ends, those among them that were cut short at `ends`."""
    free, waiting, running = list(lanes), list(jobs), list[RunningJob]()
    while (waiting or running) and time.monotonic() < ends:
        while waiting and len(free) >= min(waiting[0].lanes, len(lanes)):
            job = waiting.pop(0)
            free.sort()
            taken = [free.pop(0) for _ in range(min(job.lanes, len(lanes)))]
            running.append(begin(job, [core for lane in taken for core in lane]))
        for active in [active for active in running if active.process.poll() is not None]:
            running.remove(active)
            free += [lane for lane in lanes if set(lane) <= set(active.cores)]
            yield end(active, int(active.process.returncode))
        time.sleep(POLL_S)
    for active in running:
        os.killpg(active.process.pid, signal.SIGKILL)
        active.process.wait()
        yield end(active, CUT_SHORT)


def begin(job: Job, cores: list[int]) -> RunningJob:
    # A job that was killed leaves servers behind that still write there.
    folder = tempfile.TemporaryDirectory(prefix=f"{job.name}-", ignore_cleanup_errors=True)
    log = (Path(folder.name) / "log").open("w+", encoding="utf-8")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "RUN": str(job.run), "PATH": path, "PYTHONUNBUFFERED": "1"}
    if not job.cuda:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    process = subprocess.Popen(
        ["taskset", "-c", ",".join(map(str, cores)), "bash", "-c", job.command],
        cwd=folder.name,
        env=environment,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )
    return RunningJob(job, cores, process, log, folder)


def end(job: RunningJob, status: int) -> JobResult:
    seconds = round(time.monotonic() - job.started, 1)
    job.log.seek(0)
    output = job.log.read()[-KEPT_CHARACTERS:]
    job.log.close()
    job.folder.cleanup()
    return JobResult(job.job.name, job.job.run, status, seconds, job.cores, job.job.command, output)


def table(jobs: Sequence[Job], ended: Sequence[JobResult]) -> str:
    lines = [f"{'job':24} {'asked':>5} {'ended':>5} {'status 0':>8} {'median s':>8}"]
    for name in dict.fromkeys(job.name for job in jobs):
        of_it = [result for result in ended if result.name == name and result.status != CUT_SHORT]
        asked, good = sum(job.name == name for job in jobs), sum(result.status == 0 for result in of_it)
        seconds = f"{median(result.seconds for result in of_it):8.1f}" if of_it else ""
        lines.append(f"{name:24} {asked:5} {len(of_it):5} {good:8} {seconds}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
