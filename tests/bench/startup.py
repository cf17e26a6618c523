"""From the start of a process to its first token: with nothing compiled before, and with everything.

    python -P tests/bench/startup.py                            Qwen3-8B's shape, random weights, on a GPU
    python -P tests/bench/startup.py --checkpoint FOLDER --device cpu

Cold and warm are the caches of compiled code, which the first process finds empty and leaves to the second;
both may keep Python's own beside the sources, whatever the environment says.
The checkpoint itself is read from the page cache both times: what a disk adds is the disk's.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
STARTED = time.perf_counter()
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
BARS = {"cold": 60.0, "warm": 20.0}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoint", type=Path, help="a folder; by default one is made")
    parser.add_argument("--folder", type=Path, help="where it is made, best in memory: 16 GB")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, help="where the results go as JSON")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = arguments()
    if options.child:
        print(json.dumps(first_token(options.checkpoint, options.device)))
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        checkpoint = options.checkpoint or random_checkpoint(Path(folder) / "qwen3-8b")
        caches = {name: f"{folder}/{name.lower()}" for name in CACHES}
        results = {state: timed_start(checkpoint, options.device, caches) for state in BARS}
    for state, stages in results.items():
        print(f"{state}: first token after {stages['first_token']:.1f} s (bar {BARS[state]:.0f}); {stages}")
    if options.out is not None:
        options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def timed_start(checkpoint: Path, device: str, caches: dict[str, str]) -> dict[str, float]:
    command = [sys.executable, "-P", __file__, "--child", "--checkpoint", str(checkpoint), "--device", device]
    environment = {**os.environ, **caches}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    started = time.perf_counter()
    output = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    return {**json.loads(output.splitlines()[-1]), "process_and_exit": time.perf_counter() - started}


def first_token(checkpoint: Path, device: str) -> dict[str, float]:
    """Seconds since this process began to run, at the end of each stage."""
    import scalegate.pipeline.model_loader.load_model  # noqa: F401 - its share of the time is shown
    from scalegate.pipeline.serve import build_engine
    from scalegate.serving_check.engine.engine import Engine  # noqa: F401
    from scalegate.serving_check.engine.options import EngineOptions
    from scalegate.serving_check.engine.request import SamplingParams

    stages = {"imported": time.perf_counter() - STARTED}
    engine = build_engine(checkpoint, EngineOptions(device=device, max_model_len=2048))
    stages["built"] = time.perf_counter() - STARTED
    engine.warm_up(progress=False)
    stages["warmed_up"] = time.perf_counter() - STARTED
    engine.generate([[1, 2, 3]], SamplingParams(max_tokens=1, temperature=0.0))
    return {**stages, "first_token": time.perf_counter() - STARTED}


def random_checkpoint(folder: Path) -> Path:
    """Random weights of Qwen3-8B's shape; the tokenizer is the bundled checkpoint's, and says nothing."""
    from random_qwen3 import random_model
    from transformers import AutoTokenizer

    random_model("qwen3-8b").save_pretrained(folder)
    bundled = Path(__file__).parents[2] / "examples" / "qwen3-pycode-5m"
    AutoTokenizer.from_pretrained(bundled).save_pretrained(folder)
    return folder


if __name__ == "__main__":
    main()
