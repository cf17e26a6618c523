"""How long a verdict takes on a GPU, for an artifact of a real model's shape: servers' starts included.

    python -P tests/bench/gate/verdict_gpu.py --shape qwen3-8b --folder /dev/shm
    python -P tests/bench/gate/verdict_gpu.py --recipe kvarn-k4v2 --input-len 4096 --m 1,8,32 --out OUT
    python -P tests/bench/gate/verdict_gpu.py --recipe kvarn-k4v2 --input-len 4096 --m 1,8,32 --free-gib 78

The weights are random, but made so that the model says something: each token is followed by the next one of
the vocabulary, by a wide margin, and the layers add noise to that. So a sound artifact passes every check.
Making it, quantizing it and laying it out come before, and are not in the time. `--free-gib` leaves so much
of the GPU's memory to the servers, and takes the rest itself. A GPU of 80 GB has about 78 GiB.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from scalegate.base.atomic_files import write_json
from scalegate.serving_check.evidence.environment import describe_environment
from scalegate.tests.bench.quantization.sharded_weights import save_model
from scalegate.tests.bench.random_qwen3 import SHAPES, random_model
from torch import nn

EXAMPLE = Path(__file__).parents[3] / "examples" / "qwen3-pycode-5m"
RESULT = Path(__file__).parents[1] / "results" / "gate" / "verdict_gpu.json"
MS = "1,8,32,64,128"
MOST_SECONDS = 180
QUIET = 0.02
"""What a layer adds to the residual stream, over what the embeddings put there, about."""
MARGIN = 20.0
"""By which the logit of the next token stands out."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"), help="where the checkpoints lie")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--recipe", default="int4-hqq")
    parser.add_argument("--layout", default="swap_ab", help="what the chooser takes there for INT4")
    parser.add_argument("--input-len", type=int, default=64, help="prompt tokens a request")
    parser.add_argument("--m", default=MS)
    parser.add_argument("--free-gib", type=float, help="memory that the servers find free")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as work:
        source, artifact = Path(work) / options.shape, Path(work) / "artifact"
        make_checkpoint(options.shape, source, options.device)
        device = ["--device", options.device]
        say("quantize", pipeline("quantize", source, "--recipe", options.recipe, "--out", artifact, *device))
        load = ["--m", options.m]
        if options.recipe.startswith("int4"):
            say("layout", pipeline("layout", artifact, *load, "--layout", options.layout, *device))
        held = taken_but(options.free_gib, options.device) if options.free_gib else None
        started = time.monotonic()
        report = Path(work) / "report"
        load += ["--input-len", options.input_len]
        pipeline("validate", artifact, *load, "--report", report, *device, statuses=(0, 1, 2))
        seconds = time.monotonic() - started
        verdict = json.loads((report / "serving_check.json").read_text(encoding="utf-8"))
        del held
    result = {
        "environment": vars(describe_environment(options.device, "auto", "embedded", "embedded")),
        "shape": options.shape,
        "recipe": options.recipe,
        "ms": options.m,
        "input_len": options.input_len,
        "free_gib": options.free_gib,
        "seconds": round(seconds, 1),
        "parts": verdict["seconds_by_part"],
        "verdict": verdict["status"],
        "checks": {check["name"]: [check["status"], check["measured"]] for check in verdict["checks"]},
        "ratios": {
            point["m"]: [point["ratio"], point["ratio_low"], point["ratio_high"]]
            for point in verdict["curve"]
        },
        "blocks": {point["m"]: len(point["log_ratios"]) for point in verdict["curve"]},
    }
    write_json(options.out, result)
    say(f"{options.shape}: {verdict['status']} after", seconds)
    sys.exit(seconds > MOST_SECONDS)


def taken_but(free_gib: float, device: str) -> torch.Tensor:
    """Return a tensor that takes all memory of the GPU but this much."""
    free = torch.cuda.mem_get_info(device)[0] - int(free_gib * 2**30)
    if free < 0:
        raise SystemExit(f"the GPU has less than {free_gib} GiB free")
    return torch.empty(free, dtype=torch.uint8, device=device)


def make_checkpoint(shape: str, folder: Path, device: str) -> None:
    """A model in which token t is followed by t + 1, with the bundled checkpoint's tokenizer."""
    started = time.monotonic()
    model = random_model(shape, device)
    used = json.loads((EXAMPLE / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    embeddings = model.get_input_embeddings().weight
    output = model.get_output_embeddings().weight
    if output is embeddings:
        raise SystemExit(f"{shape}: its output layer is its embeddings, and can say no other token than they")
    with torch.no_grad():
        embeddings.normal_()
        # A token of length sqrt(H) that is its own direction has a product of H with itself.
        output.zero_()
        output[:used] = embeddings[:used].roll(1, 0) * (MARGIN / embeddings.shape[1])
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear) and name.endswith(("o_proj", "down_proj")):
                module.weight.mul_(QUIET)
    save_model(model, folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(EXAMPLE / name, folder / name)
    del model
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    say("made", time.monotonic() - started)


def pipeline(*words: object, statuses: tuple[int, ...] = (0,)) -> float:
    """Seconds that the command took, Python's start included."""
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-P", "-m", "scalegate.pipeline", *map(str, words)])
    if done.returncode not in statuses:
        raise SystemExit(f"{words[0]} ended with status {done.returncode}")
    return time.monotonic() - started


def say(what: str, seconds: float) -> None:
    print(f"== {what} {seconds:.1f} s", flush=True)


if __name__ == "__main__":
    main()
