"""From the start of a process to its first token: with nothing compiled before, and with everything.

    python -P tests/bench/engine/startup.py                       Qwen3-8B's shape, random weights, a GPU
    python -P tests/bench/engine/startup.py --checkpoint FOLDER --device cpu
    python -P tests/bench/engine/startup.py --before OTHER_TREE   two trees, started at the same time
                                                                with so many tokens of KV cache each

Cold and warm are the caches of compiled code, which the first process finds empty and leaves to the second;
both may keep Python's own beside the sources, whatever the environment says.
The checkpoint itself is read from the page cache both times: what a disk adds is the disk's.
"""

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from scalegate.tests.bench.engine.before_after import environment_of

STARTED = time.perf_counter()
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
BARS = {"cold": 60.0, "warm": 20.0}
LEAST_OF_BEFORE = 0.97
"""Least speed of a start, against the other tree's."""
ROOT = Path(__file__).resolve().parents[3]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoint", type=Path, help="a folder; by default one is made")
    parser.add_argument("--folder", type=Path, help="where it is made, best in memory: 16 GB")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--before", type=Path, help="another tree of Scalegate, to compare with")
    parser.add_argument("--out", type=Path, help="where the results go as JSON")
    parser.add_argument("--kv-cache-tokens", type=int, help="default all there is; of two trees 65536")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = arguments()
    if options.child:
        print(json.dumps(first_token(options.checkpoint, options.device, options.kv_cache_tokens)))
        return
    if options.before and options.kv_cache_tokens is None:
        options.kv_cache_tokens = 65536
    trees = {"after": ROOT} | ({"before": options.before.resolve()} if options.before else {})
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        checkpoint = (options.checkpoint or random_checkpoint(Path(folder) / "qwen3-8b")).resolve()
        found = {state: timed_starts(trees, checkpoint, options, Path(folder)) for state in BARS}
    for state, stages in found.items():
        for tree, times in stages.items():
            seconds = f"{times['first_token']:.1f} s (bar {BARS[state]:.0f})"
            print(f"{tree}, {state}: first token after {seconds}; {times}")
    if options.before:
        ratios = {
            state: times["before"]["first_token"] / times["after"]["first_token"]
            for state, times in found.items()
        }
        print(f"speed of after, of before's: {ratios} (bar {LEAST_OF_BEFORE})")
        results = {**found, "ratios": ratios}
    else:
        results = {state: stages["after"] for state, stages in found.items()}
    if options.out is not None:
        options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def timed_starts(
    trees: dict[str, Path], checkpoint: Path, options: argparse.Namespace, folder: Path
) -> dict[str, dict[str, float]]:
    """All trees at once, so that what else the machine does meets them alike; each with caches of its own."""
    started = time.perf_counter()
    processes = {}
    for tree, path in trees.items():
        environment = environment_of(path, folder / f"{tree}-root")
        environment |= {name: str(folder / f"{tree}-{name.lower()}") for name in CACHES}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        command = [sys.executable, "-P", __file__, "--child", "--checkpoint", str(checkpoint)]
        command += ["--device", options.device]
        command += ["--kv-cache-tokens", str(options.kv_cache_tokens)] if options.kv_cache_tokens else []
        processes[tree] = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    stages = {}
    for tree, process in processes.items():
        output, _ = process.communicate()
        if process.returncode != 0:
            raise SystemExit(f"{tree} ended with status {process.returncode}; its errors are above")
        stages[tree] = {**json.loads(output.splitlines()[-1]), "ended_by": time.perf_counter() - started}
    return stages


def first_token(checkpoint: Path, device: str, kv_cache_tokens: int | None) -> dict[str, float]:
    """Seconds since this process began to run, at the end of each stage."""
    with contextlib.suppress(ImportError):  # as the engine's process does, where the tree has it
        from scalegate.base.gc_threshold import search_rarely

        search_rarely()
    import scalegate.pipeline.model_loader.load_model  # noqa: F401 - its share of the time is shown
    from scalegate.serving_check.engine import request
    from scalegate.serving_check.engine.engine import Engine  # noqa: F401

    stages = {"imported": time.perf_counter() - STARTED}
    sizes = {"max_model_len": 2048, "kv_cache_tokens": kv_cache_tokens}
    if hasattr(request, "EngineConfig"):  # a tree from before an engine's options were one object
        from scalegate.pipeline.commands import serve

        described = serve.ModelOptions(checkpoint, device)
        engine = serve.build_engine(described, request.EngineConfig(**sizes))
    else:
        from scalegate.pipeline.model_loader.served_checkpoint import build_engine
        from scalegate.serving_check.engine.options import EngineOptions

        engine = build_engine(checkpoint, EngineOptions(device=device, **sizes))
    stages["built"] = time.perf_counter() - STARTED
    engine.warm_up(progress=False)
    stages["warmed_up"] = time.perf_counter() - STARTED
    engine.generate([[1, 2, 3]], request.SamplingParams(max_tokens=1, temperature=0.0))
    return {**stages, "first_token": time.perf_counter() - STARTED}


def random_checkpoint(folder: Path, model: str = "qwen3-8b", device: str = "cuda") -> Path:
    """Random weights of a shape; the tokenizer is the bundled checkpoint's, and says nothing."""
    from scalegate.tests.bench.random_qwen3 import random_model
    from transformers import AutoTokenizer

    random_model(model, device).save_pretrained(folder)
    bundled = Path(__file__).parents[3] / "examples" / "qwen3-pycode-5m"
    AutoTokenizer.from_pretrained(bundled).save_pretrained(folder)
    return folder


if __name__ == "__main__":
    main()
