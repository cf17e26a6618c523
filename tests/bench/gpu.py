"""Everything that needs a GPU in one call: tests, then benches, each within its time, and a short table last.

    python -P tests/bench/gpu.py --out OUT
    python -P tests/bench/gpu.py --out OUT --seconds 580 --only tests soak serving-8b

What times nothing runs first, all at once; what times runs alone. A part whose limit no longer fits into
`--seconds` is not begun. Each part leaves OUT/PART.log, and a bench its OUT/PART.json, also where the run is
cut short. The greedy part needs `--checkpoint`, qwen3-pycode-29m. On one H200 all of it takes half an hour;
the limits are that machine's times and a third more.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
BENCH = Path(__file__).parent
PYTEST = ["-m", "pytest", "-v", "--tb=short", "-p", "no:cacheprovider", "--import-mode=importlib"]
PYTEST += ["--durations=12"]
PYTEST += ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT)]
SHOWN_LINES = 12
GREEDY = "greedy"


@dataclass(frozen=True)
class Part:
    """One process: its arguments after `python -P`, and the seconds it may take."""

    name: str
    arguments: list[str]
    limit: int
    times: bool = True
    """Whether it must run alone."""

    @property
    def is_bench(self) -> bool:
        return self.arguments[0] != "-m"


def tests(name: str, chosen: list[str], processes: int, limit: int) -> Part:
    """Tests in so many processes, since most of their time is compiling on one core.

    Each begins with a run of neighbours, which mostly share kernels, and takes others' tests when it is done.
    """
    dealt = ["--numprocesses", str(processes), "--dist", "worksteal"]
    return Part(name, [*PYTEST, *dealt, *chosen], limit, times=False)


def marked_gpu(alone: bool = False) -> list[str]:
    """Files with such tests. The others' imports may need what a GPU machine lacks."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    chosen = [str(file) for file in files if "mark.gpu" in file.read_text(encoding="utf-8")]
    return ["-m", f"gpu and {'alone' if alone else 'not alone'}", *chosen]


def bench(name: str, limit: int, script: str, *options: str, times: bool = True) -> Part:
    return Part(name, [str(BENCH / script), *options], limit, times)


INT8 = ["--format", "int8", "--layouts", "int8_swap_ab,int8_swap_ab_invariant,gpu_dequantized"]
NVFP4 = ["--format", "nvfp4", "--layouts", "nvfp4_swap_ab,nvfp4_swap_ab_invariant,humming"]
IN_MEMORY = ["--folder", "/dev/shm"]
PARTS = [
    tests("tests", marked_gpu(), 13, limit=400),
    Part("tests-alone", [*PYTEST, *marked_gpu(alone=True)], 90),
    tests("tests-kernels", [str(ROOT / "tests" / "kernels" / "interpreted")], 3, limit=400),
    bench(
        "soak", 300, "engine/soak.py", str(ROOT / "examples" / "qwen3-pycode-5m"),
        "--device", "cuda", "--rate", "120", "--kv-cache-tokens", "30000", times=False,
    ),
    bench(GREEDY, 200, "engine/greedy.py", times=False),
    bench("serving-8b", 150, "engine/serving.py", "--models", "qwen3-8b"),
    bench("serving-4b", 120, "engine/serving.py", "--models", "qwen3-4b"),
    bench("startup", 120, "engine/startup.py", *IN_MEMORY),
    bench("streaming", 130, "engine/streaming.py", "qwen3-8b", "--n", "128"),
    bench("kv-formats", 230, "layouts/kv_formats.py", "--formats", "unquantized", "fp8"),
    bench("attention", 120, "kernels/attention.py"),
    bench("prefill", 150, "kernels/prefill.py"),
    bench("int4-engine", 150, "engine/int4_engine.py"),
    bench("linear-8b", 60, "kernels/linear.py", "--model", "qwen3-8b", "--layouts", "swap_ab"),
    bench("linear-4b", 60, "kernels/linear.py", "--model", "qwen3-4b", "--layouts", "swap_ab"),
    bench("linear-70b", 90, "kernels/linear.py", "--model", "llama3-70b", "--layouts", "swap_ab"),
    bench(
        "int8-8b", 90, "kernels/linear.py", "--model", "qwen3-8b", *INT8,
        "--m", "1,2,4,8,16,32,64,128,256,512",
    ),
    bench("nvfp4-8b", 150, "kernels/linear.py", "--model", "qwen3-8b", *NVFP4),
    bench("nvfp4-4b", 150, "kernels/linear.py", "--model", "qwen3-4b", *NVFP4),
    bench("nvfp4-70b", 170, "kernels/linear.py", "--model", "llama3-70b", *NVFP4),
    bench("linear-peers", 300, "kernels/linear.py", "--m", "1,8,16,32,64,128,256,512", "--tuning-ms", "20"),
    bench("iq2-xxs", 90, "kernels/iq2_xxs.py"),
    bench("nvfp4-engine", 300, "engine/nvfp4_engine.py", *IN_MEMORY),
    bench("nvfp4-solver", 60, "quantization/solver.py", "--device", "cuda", "--format", "nvfp4"),
    bench("rival", 500, "gate/rival.py", *IN_MEMORY),
    bench("experts", 120, "kernels/experts.py"),
    bench("experts-one-token", 100, "kernels/experts_one_token.py"),
    bench("moe", 180, "engine/moe.py"),
    bench("chooser", 170, "layouts/chooser.py"),
    bench("load", 70, "engine/load.py", *IN_MEMORY),
    bench("replay", 240, "gate/replay.py", "--layers", "4"),
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=list(dict.fromkeys(part.name for part in PARTS)))
    parser.add_argument("--checkpoint", type=Path, help="for the greedy part")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="for all of it")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    parts = [part for part in PARTS if options.only is None or part.name in options.only]
    ends = time.monotonic() + options.seconds
    outcomes: dict[str, str] = {}
    together = [part for part in parts if not part.times]
    for group in [together, *([part] for part in parts if part.times)]:
        for part, outcome in run(group, options, ends):
            outcomes[part.name] = outcome
            last = log_of(part, options.out).read_text(encoding="utf-8", errors="replace").splitlines()
            shown = SHOWN_LINES if part.is_bench or not outcome.startswith("ok") else 1
            print(f"\n== {part.name}: {outcome}", *last[-shown:], sep="\n", flush=True)
    print()
    for part in parts:
        print(f"{part.name:<16} {outcomes.get(part.name, 'not begun')}")
    sys.exit(any(not outcomes.get(part.name, "").startswith("ok") for part in parts))


def log_of(part: Part, out: Path) -> Path:
    return out / f"{part.name}.log"


def run(group: list[Part], options: argparse.Namespace, ends: float) -> list[tuple[Part, str]]:
    """The parts that still fit, all at once, each with how it ended."""
    started = time.monotonic()
    begun = []
    with tempfile.TemporaryDirectory() as elsewhere:
        for part in group:
            needs_checkpoint = part.name == GREEDY
            if started + part.limit > ends or (needs_checkpoint and options.checkpoint is None):
                continue
            arguments = part.arguments + ([str(options.checkpoint.resolve())] if needs_checkpoint else [])
            if part.is_bench:
                arguments = [*arguments, "--out", str(options.out.resolve() / f"{part.name}.json")]
            with log_of(part, options.out).open("w", encoding="utf-8") as log:
                # Not in the repository: its folders would stand for packages of the same names.
                process = subprocess.Popen(
                    [sys.executable, "-u", "-P", *arguments],
                    cwd=elsewhere,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            begun.append((part, process))
        return [(part, outcome_of(process, started, part.limit)) for part, process in begun]


def outcome_of(process: subprocess.Popen, started: float, limit: int) -> str:
    try:
        status = process.wait(max(0.0, started + limit - time.monotonic()))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the servers that it has started, too
        process.wait()
        return f"cut short after {limit} s"
    seconds = time.monotonic() - started
    return f"ok in {seconds:.0f} s" if status == 0 else f"failed (status {status}) after {seconds:.0f} s"


if __name__ == "__main__":
    main()
