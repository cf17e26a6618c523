"""NVFP4 quality: our solver beside four others on trained checkpoints, by relative L2 and by extra nats.

    python -P tests/bench/quantization/nvfp4_quality.py CHECKPOINT... --heldout FILE.jsonl --work DIR \
        --out OUT/nvfp4_quality.json

All linear layers but lm_head: our recipe `nvfp4` and the checkpoints that llm-compressor and ModelOpt make
are read back by our own readers; `fouroversix` and `qwantize` quantize the weights they are given. qwantize's
Hessian-weighted search is shown as well and decides nothing: it is the only one that sees a text. Each tool
runs in an environment of its own. Weights are evaluated in float32, documents cut into windows of `--context`
tokens. What was scored is recorded a slice of the text at a time, so a run that was stopped goes on.
"""

import argparse
import json
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from scalegate.base.atomic_files import write_json
from scalegate.layouts.formats.weight_format import Weight
from scalegate.pipeline.checkpoints.checkpoint import open_checkpoint
from scalegate.pipeline.commands.quantize import quantize
from scalegate.pipeline.conventions.all_conventions import convention_of
from scalegate.serving_check.quality import read_texts, token_windows
from scalegate.tests.bench.quantization.interchange_tools.environments import (
    REQUIREMENTS,
    SOLVERS,
    make_environments,
)
from scalegate.tests.bench.quantization.model_nats import nats_per_token, predicted_tokens
from torch import Tensor

TOOLS = Path(__file__).parent / "interchange_tools"

ENVIRONMENTS = dict(REQUIREMENTS) | SOLVERS
OURS, PLAIN = "scalegate", "unquantized"
INFORMATION = ("qwantize, Hessian",)
"""Shown beside the others; calibrated on a text."""
CALIBRATION_WINDOWS, WINDOW_TOKENS = 8, 256
SLICE_WINDOWS = 32
RUN_TOOLS = {
    "llm-compressor NVFP4A16": ("llmcompressor", "make_llmcompressor.py", "NVFP4A16"),
    "ModelOpt W4A16_NVFP4": ("modelopt", "make_modelopt.py", "W4A16_NVFP4"),
}

Weights = Mapping[str, Tensor]


def checkpoint_weights(folder: Path) -> dict[str, Tensor]:
    """The dequantized linear weights of a checkpoint in any convention, fp32, by module."""
    checkpoint = open_checkpoint(folder)
    found = {}
    for name, stored in convention_of(checkpoint).modules(checkpoint).items():
        weight = stored.read()
        found[name] = weight.dequantize(torch.float32) if isinstance(weight, Weight) else weight.float()
    return found


class Subjects:
    """Everybody's weights of one checkpoint; made once, in `work`."""

    def __init__(self, checkpoint: Path, work: Path, environments: Path):
        self.checkpoint, self.work = checkpoint.resolve(), work.resolve()
        self.work.mkdir(parents=True, exist_ok=True)
        self.pythons = make_environments(environments, ENVIRONMENTS)
        self.calibration = self.work / "calibration.json"

    def prepare(self, windows: list[Tensor]) -> dict[str, str]:
        """Make what is missing; the versions of the tools."""
        full = [w[:WINDOW_TOKENS].tolist() for w in windows if w.numel() >= WINDOW_TOKENS]
        write_json(self.calibration, full[-CALIBRATION_WINDOWS:])
        quantize(self.checkpoint, "nvfp4", self.work / OURS, device="cpu", progress=False)
        versions: dict[str, str] = {}
        for subject, (tool, script, scheme) in RUN_TOOLS.items():
            arguments = [scheme, self.calibration]
            arguments += [self.calibration] if tool == "modelopt" else []
            versions |= self._once(subject, tool, script, *arguments)
        return versions | self._once("solvers", "solvers", "make_nvfp4_solvers.py", self.calibration)

    def weights(self) -> Iterator[tuple[str, Weights]]:
        yield PLAIN, {}
        for subject in (OURS, *RUN_TOOLS):
            yield subject, checkpoint_weights(self.work / subject)
        for path in sorted((self.work / "solvers").glob("*.safetensors")):
            yield path.stem, load_file(path)

    def _once(self, subject: str, tool: str, script: str, *arguments: object) -> dict[str, str]:
        folder, done = self.work / subject, self.work / f"{subject}.json"
        if not done.is_file():
            folder.mkdir(exist_ok=True)
            command = [str(self.pythons[tool]), str(TOOLS / script), str(self.checkpoint), str(folder)]
            subprocess.run([*command, *map(str, arguments)], check=True)
            listed = subprocess.run(
                [str(self.pythons[tool]), "-m", "pip", "list", "--format", "json"],
                check=True, capture_output=True, text=True,
            )  # fmt: skip
            write_json(done, {load["name"]: load["version"] for load in json.loads(listed.stdout)})
        wanted = {requirement.split("==")[0].partition("[")[0] for requirement in ENVIRONMENTS[tool]}
        return {name: version for name, version in json.loads(done.read_text()).items() if name in wanted}


def relative_l2(original: Weights, changed: Weights) -> float:
    error = sum(
        float((changed[name] - weight.float()).double().square().sum()) for name, weight in original.items()
    )
    return (error / sum(float(weight.double().square().sum()) for weight in original.values())) ** 0.5


def measure(checkpoint: Path, options: argparse.Namespace, results: dict[str, Any]) -> None:
    """Score every subject on every slice of the text that is not in `results` yet."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    windows = token_windows(tokenizer, read_texts(options.heldout), options.context)
    environments = options.environments or options.work / "environments"
    subjects = Subjects(checkpoint, options.work / checkpoint.name, environments.resolve())
    entry = results.setdefault(checkpoint.name, {"subjects": {}})
    entry["tokens"] = sum(window.numel() for window in windows)
    entry["versions"] = subjects.prepare(windows)
    stored = open_checkpoint(checkpoint)
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    everybody = dict(subjects.weights())
    original = {name: stored.read(f"{name}.weight").float() for name in everybody[OURS]}
    cells = {subject: entry["subjects"].setdefault(subject, {"slices": []}) for subject in everybody}
    for subject, weights in everybody.items():
        cells[subject]["relative_l2"] = relative_l2(original, weights or original)
    # Slice by slice, so that all have read the same text whenever the run is stopped.
    for index, start in enumerate(range(0, len(windows), SLICE_WINDOWS)):
        for subject, weights in everybody.items():
            if len(cells[subject]["slices"]) > index:
                continue
            for name, value in (weights or original).items():
                model.get_submodule(name).weight.data.copy_(value)
            slice_windows = windows[start : start + SLICE_WINDOWS]
            tokens, nats = predicted_tokens(slice_windows), nats_per_token(model, slice_windows)
            cells[subject]["slices"].append([tokens, nats])
            report(options, results)


def report(options: argparse.Namespace, results: Mapping[str, Any]) -> None:
    """Write down what was scored so far, over the slices that all subjects of a checkpoint have read."""
    for entry in results.values():
        cells = entry["subjects"]
        count = min(len(cell["slices"]) for cell in cells.values())
        entry["tokens_scored"] = sum(tokens for tokens, _ in cells[PLAIN]["slices"][:count])
        for cell in cells.values():
            total = sum(tokens * nats for tokens, nats in cell["slices"][:count])
            cell["nats_per_token"] = total / max(1, entry["tokens_scored"])
        for cell in cells.values():
            cell["extra_nats_per_token"] = cell["nats_per_token"] - cells[PLAIN]["nats_per_token"]
    settings = {"context": options.context, "evaluated_in": "float32", "torch": torch.__version__}
    write_json(options.out, settings | {"holds": holds(results), "checkpoints": results})


def beats(ours: Mapping[str, float], theirs: Mapping[str, float]) -> bool:
    return all(ours[key] <= theirs[key] for key in ("relative_l2", "extra_nats_per_token"))


def holds(results: Mapping[str, Any]) -> bool:
    """Whether ours is at or below all that decide, on every checkpoint."""
    return all(
        beats(entry["subjects"][OURS], cell)
        for entry in results.values()
        for subject, cell in entry["subjects"].items()
        if subject not in (PLAIN, *INFORMATION)
    )


def table(results: Mapping[str, Any]) -> None:
    for name, entry in results.items():
        print(f"\n{name}, {entry['tokens_scored']} of {entry['tokens']} tokens")
        print(f"{'':28}{'relative L2':>14}{'extra nats':>14}")
        for subject, cell in entry["subjects"].items():
            print(f"{subject:28}{cell['relative_l2']:14.6f}{cell['extra_nats_per_token']:14.6f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoints", nargs="+", type=Path)
    parser.add_argument("--heldout", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True, help="folder for what the tools make")
    parser.add_argument("--environments", type=Path, help="folder of their environments; default in WORK")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    results = json.loads(options.out.read_text())["checkpoints"] if options.out.is_file() else {}
    for path in options.checkpoints:
        measure(path, options, results)
    report(options, results)
    table(results)


if __name__ == "__main__":
    main()
