"""What calibrating an 8B model takes on a GPU: seconds a layer, seconds and memory of drawing, the whole.

    python -P tests/bench/quantization/calibration_time.py --folder /dev/shm --out OUT/calibration_time.json
    python -P tests/bench/quantization/calibration_time.py --checkpoint examples/qwen3-pycode-5m \
        --device cpu \
        --layers 2 --drawn 4 --jobs int4-gptq:16x64 drawing --out tiny.json

Random weights of Qwen3-8B's shape, all 36 layers, in --folder; the text is random tokens, 512 sequences
of 512 (as recipes cut it; as many tokens as 128 of 2,048) or as a job says, int4-gptq:256x512. A job ends
after --layers layers, as every layer after the first does the same work: the first has compiling in it, and
reads the text once less, as the original's inputs are its own. Estimated of the whole: loading, the first
layer, as many of the others as the model has, and all that the recipe draws where no text is given (512
sequences, half of that where it learns no rounding) at the time of --drawn of them. Writing is left out:
`--written` quantizes the whole with int4-hqq, which reads, rounds and writes as much.

Memory is torch's most allocated and most reserved; the driver's part of a process, about half a gigabyte,
is beside that. Each job has a process of its own.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import Any

# Sets OpenMP's threads as it does for the commands, which has to come before torch.
import scalegate.pipeline  # noqa: F401
import torch
from scalegate.base.atomic_files import write_json
from scalegate.pipeline.checkpoints.checkpoint import open_checkpoint
from scalegate.pipeline.commands.quantize import quantize
from scalegate.pipeline.model_loader.hidden_states import HiddenStates
from scalegate.pipeline.model_loader.layer_stream import LayerStream
from scalegate.pipeline.quantization.calibration import calibration, layer_solver, self_calibration
from scalegate.pipeline.quantization.calibration.calibration_text import SEQUENCE_TOKENS, SEQUENCES
from scalegate.pipeline.quantization.calibration.layer_inputs import Inputs, LayerInputs
from scalegate.pipeline.quantization.calibration.layer_solver import LayerSolver
from scalegate.pipeline.quantization.job import prepare
from scalegate.pipeline.quantization.job_calibration import UNLEARNED_SEQUENCES
from scalegate.pipeline.quantization.solvers import learned_rounding, second_order
from scalegate.pipeline.records.recipe_file import load_recipe
from scalegate.tests.bench.engine.startup import random_checkpoint

MODEL = "qwen3-8b"
RECIPES = ("int4-gptq", "int4-best")
DRAWING, WRITING = "drawing", "int4-hqq, written"
STAGES = {
    "reading the text": (LayerInputs, "read"),
    "solving": (LayerSolver, "solve"),
    "learning": (calibration._Visit, "_learn"),
}
PARTS = {
    "a layer's weights placed": (LayerStream, "place"),
    "a layer's weights dropped": (LayerStream, "drop"),
    "states after the layer": (LayerStream, "advance"),
    "layer file": (calibration, "write_layer"),
    "states read": (HiddenStates, "read"),
    "states written": (HiddenStates, "write"),
    "through the model": (LayerStream, "_through"),
    "sums of inputs": (Inputs, "see"),
    "sums beside the original's": (Inputs, "see_original"),
    "weights read": (LayerSolver, "_values"),
    "rounded by itself": (LayerSolver, "_plain"),
    "problems": (LayerSolver, "problem"),
    "of those, factors": (layer_solver, "prepare"),
    "GPTQ": (second_order, "_first_pass"),
    "descent": (second_order, "_descend"),
    "gradients": (learned_rounding._Layer, "differentiate"),
    "loss": (learned_rounding._Layer, "loss"),
    "steps of Adam": (torch.optim.Adam, "step"),
    "values put": (learned_rounding._LearnedWeight, "put"),
}
"""Of those stages, and between them: timed with --profile, which waits for the GPU after each."""


def main() -> None:
    options = arguments()
    if options.job is not None:
        write_json(options.out, run(options))
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        checkpoint = options.checkpoint or Path(temporary) / MODEL
        if not (checkpoint / "config.json").is_file():
            started = time.perf_counter()
            make = [sys.executable, "-P", __file__, "--make", str(checkpoint)]
            subprocess.run([*make, "--device", options.device], check=True)
            print(f"{checkpoint} made in {time.perf_counter() - started:.0f} s", flush=True)
        if not options.jobs:
            return
        results: dict[str, Any] = {"checkpoint": checkpoint.name, "torch": torch.__version__}
        results |= {"sequences": options.sequences, "jobs": {}}
        for job in options.jobs:
            out = Path(temporary) / "job.json"
            command = [sys.executable, "-P", __file__, "--job", job, "--out", str(out)]
            command += ["--checkpoint", str(checkpoint), "--device", options.device]
            command += ["--sequences", options.sequences, "--layers", str(options.layers)]
            command += ["--drawn", str(options.drawn), "--folder", temporary]
            command += ["--profile"] if options.profile else []
            subprocess.run(command, check=True)
            results["jobs"][job] = json.loads(out.read_text(encoding="utf-8"))
            if options.out:
                write_json(options.out, results)
        show(results["jobs"])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoint", type=Path, help="made there where it is not there yet")
    parser.add_argument("--folder", type=Path, help="for what is written, best in memory: 32 GB")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--sequences", default="512x512", help="of the text, x tokens of each")
    parser.add_argument("--layers", type=int, default=3, help="after which a job is ended")
    parser.add_argument("--drawn", type=int, default=self_calibration.AT_ONCE, help="sequences drawn")
    parser.add_argument(
        "--jobs",
        nargs="*",
        default=[*RECIPES, DRAWING],
        help="recipes of INT4, 'drawing'; none makes the checkpoint and no more",
    )
    parser.add_argument("--written", dest="jobs", action="append_const", const=WRITING)
    parser.add_argument("--profile", action="store_true", help="times of parts as well, which adds to them")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--make", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.make is not None:
        random_checkpoint(options.make, MODEL, options.device)
        sys.exit()
    return options


def run(options: argparse.Namespace) -> dict[str, Any]:
    """One job in this process."""
    on_gpu = options.device == "cuda"
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        if options.job == DRAWING:
            result = drawn(options, Path(folder))
        elif options.job == WRITING:
            quantize(options.checkpoint, "int4-hqq", Path(folder) / "artifact", device=options.device)
            result = {}
        else:
            result = calibrated(options, Path(folder))
    result["seconds"] = time.perf_counter() - started
    if on_gpu:
        result["device"] = torch.cuda.get_device_name()
        result["gigabytes_allocated"] = torch.cuda.max_memory_allocated() / 1e9
        result["gigabytes_reserved"] = torch.cuda.max_memory_reserved() / 1e9
    print(f"{options.job}: {result}", flush=True)
    return result


def drawn(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Seconds of loading, and of each sequence of those that are drawn."""
    checkpoint = open_checkpoint(options.checkpoint)
    device, shape = torch.device(options.device), (options.drawn, SEQUENCE_TOKENS)
    spent: dict[str, float] = defaultdict(float)
    with timed(self_calibration, "_draw", spent, device):
        started = time.perf_counter()
        self_calibration.sample_sequences(checkpoint, shape, device, folder / "drawn.safetensors", True)
        seconds = time.perf_counter() - started
    return {
        "sequences": options.drawn,
        "at_once": self_calibration.sequences_at_once(checkpoint, SEQUENCE_TOKENS, device),
        "loading": seconds - spent["_draw"],
        "a_sequence": spent["_draw"] / options.drawn,
    }


def calibrated(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Seconds of the recipe's first layers, and what of them its stages took."""
    checkpoint = open_checkpoint(options.checkpoint)
    device = torch.device(options.device)
    recipe, _, sequences_asked = options.job.partition(":")
    job = prepare(checkpoint, load_recipe(recipe), None, device, "self")
    linears = [task.linear for task in job.tasks.in_order if task.linear is not None and task.is_quantized]
    count, tokens = map(int, (sequences_asked or options.sequences).split("x"))
    vocabulary = json.loads((options.checkpoint / "config.json").read_text())["vocab_size"]
    generator = torch.Generator().manual_seed(7)
    sequences = torch.randint(vocabulary, (count, tokens), generator=generator)
    learns = job.needs.learning_steps > 0
    spent: dict[str, float] = defaultdict(float)
    layers = _Layers(options.layers, spent, device)
    calibration.progress_bar = layers.of  # type: ignore[assignment]
    timed_ones = STAGES | PARTS if options.profile else STAGES
    with ExitStack() as stages, suppress(_Enough):
        for stage, (owner, name) in timed_ones.items():
            stages.enter_context(timed(owner, name, spent, device, stage))
        calibration.calibrate(
            checkpoint, linears, job.needs, sequences, job.quantizer, {}, folder / "work", True
        )
    shutil.rmtree(folder / "work", ignore_errors=True)
    return {
        "text": [count, tokens],
        "draws": SEQUENCES if learns else UNLEARNED_SEQUENCES,
        "all_layers": layers.total,
        "before_the_first": layers.before,
        "layers": layers.found,
    }


class _Enough(Exception):
    """Ends a job after its first layers."""


class _Layers:
    """In the place of the job's progress bar: when it moves on, a layer is done."""

    def __init__(self, most: int, spent: dict[str, float], device: torch.device):
        self.most, self.spent, self.device = most, spent, device
        self.found: list[dict[str, Any]] = []
        self.at, self.before, self.total, self.said = time.perf_counter(), 0.0, 0, ""

    def of(self, total: int, **_: object) -> "_Layers":
        """The bar of a job of so many layers."""
        self.total = total
        return self

    def __enter__(self) -> "_Layers":
        wait(self.device)
        now = time.perf_counter()
        self.before, self.at = now - self.at, now
        return self

    def __exit__(self, *_: object) -> None:
        """As a bar is closed."""

    def set_postfix_str(self, said: str, **_: object) -> None:
        self.said = said

    def update(self) -> None:
        wait(self.device)
        now = time.perf_counter()
        layer: dict[str, Any] = {"seconds": now - self.at, **self.spent, "said": self.said}
        if self.device.type == "cuda":
            layer["gigabytes_allocated"] = torch.cuda.max_memory_allocated() / 1e9
        self.found.append(layer)
        print(f"layer {len(self.found)}: {layer}", flush=True)
        self.spent.clear()
        self.at = time.perf_counter()
        if len(self.found) == self.most:
            raise _Enough


@contextmanager
def timed(
    owner: Any, name: str, spent: dict[str, float], device: torch.device, stage: str | None = None
) -> Iterator[None]:
    """Within it, seconds of each call of `owner.name` are added to `spent`, waited for on a GPU."""
    function = getattr(owner, name)

    @wraps(function)
    def measured(*given: Any, **named: Any) -> Any:
        wait(device)
        started = time.perf_counter()
        try:
            return function(*given, **named)
        finally:
            wait(device)
            spent[stage or name] += time.perf_counter() - started

    setattr(owner, name, measured)
    try:
        yield
    finally:
        setattr(owner, name, function)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def show(jobs: dict[str, dict[str, Any]]) -> None:
    drawing = jobs.get(DRAWING)
    for name, job in jobs.items():
        memory = f"{job['gigabytes_reserved']:.1f} GB reserved" if "gigabytes_reserved" in job else ""
        if "layers" not in job:
            print(f"{name}: {job['seconds']:.0f} s, {memory}", flush=True)
            continue
        seconds = [layer["seconds"] for layer in job["layers"]]
        later = sum(seconds[1:]) / max(1, len(seconds) - 1) if len(seconds) > 1 else seconds[0]
        whole = job["before_the_first"] + seconds[0] + (job["all_layers"] - 1) * later
        drawn = ""
        if drawing is not None:
            more = drawing["loading"] + job["draws"] * drawing["a_sequence"]
            drawn, whole = f" + {more:.0f} s of drawing {job['draws']} sequences", whole + more
        print(
            f"{name}: {', '.join(f'{elapsed:.1f}' for elapsed in seconds)} s a layer; "
            f"{job['all_layers']} of them{drawn}: {whole:.0f} s, {memory}",
            flush=True,
        )


if __name__ == "__main__":
    main()
