"""Do we read other tools' checkpoints as they do, and do they read ours: nats per token on the same windows.

Each tool runs in an environment of its own, made where it is missing (`interchange_tools/environments.py`).
What other tools made also goes through `pipeline validate`, at settings too small to settle its throughput:
it has to load, serve and be judged.

    python tests/bench/quantization/interchange.py --checkpoint CHECKPOINT [CHECKPOINT ...] \
        --text heldout.jsonl --work DIR
"""

import argparse
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from scalegate.base.atomic_files import write_json
from scalegate.layouts.formats.int4 import Int4, Int4Weight, pack_nibbles
from scalegate.pipeline.checkpoints.checkpoint import Checkpoint, open_checkpoint
from scalegate.pipeline.commands.quantize import quantize
from scalegate.pipeline.conventions.all_conventions import EXPORTS
from scalegate.pipeline.model_loader.load_model import load_model
from scalegate.tests.bench.quantization.interchange_tools.environments import make_environments
from scalegate.tests.bench.quantization.interchange_tools.score import nats_per_token
from scalegate.tests.verdict_files import read_verdict
from transformers import AutoTokenizer

TOOLS = Path(__file__).parent / "interchange_tools"
RESULT = Path(__file__).parents[1] / "results" / "quantization" / "interchange.json"
BOUND = 0.002
WINDOWS, WINDOW_TOKENS, CALIBRATION_WINDOWS = 64, 256, 8
VALIDATE = "--m 1,2 --waves 1 --max-blocks 2 --input-len 16 --output-len 16 --quality-tokens 1024"
MINMAX: dict[str, tuple[bool, dict[str, int]]] = {
    "symmetric g128": (True, {}),
    "asymmetric g128": (False, {}),
    "asymmetric g128, down_proj g64": (False, {"down_proj": 64}),
}
NVFP4_READERS = {
    "compressed-tensors": "compressed-tensors",
    "llmcompressor": "compressed-tensors",
    "modelopt": "modelopt",
    "torchao": "torchao",
}
"""Who reads our NVFP4, and the convention it is written in for that."""
W4A4_READERS = {reader: export for reader, export in NVFP4_READERS.items() if reader != "torchao"}
MUST_PASS = ("loads", "canary text", "no failed requests", "M reached")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, nargs="+", required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True, help="folder for the checkpoints that are made")
    parser.add_argument(
        "--environments", type=Path, help="folder of the tools' environments; default in WORK"
    )
    parser.add_argument("--only", nargs="+", help="rows to measure again, by name; the others stay recorded")
    options = parser.parse_args()
    pythons = make_environments((options.environments or options.work / "environments").resolve())
    held = True
    for checkpoint in options.checkpoint:
        work = (options.work / checkpoint.name).resolve()
        work.mkdir(parents=True, exist_ok=True)
        windows = write_windows(checkpoint, options.text, work)
        print(f"\n{checkpoint.name}: nats per token, ours, theirs, apart; validate", flush=True)
        interchange = Interchange(checkpoint.resolve(), work, *windows, options.text.resolve(), pythons)
        for what, measure in interchange.rows():
            if options.only is None or what in options.only:
                row = {"what": what, **measure()}
                print(as_line(row), flush=True)
                record(checkpoint.name, row)
                held = held and row.get("holds", True)
    if not held:
        raise SystemExit("something above does not hold")


def record(checkpoint: str, row: dict[str, Any]) -> None:
    """Into the result at once: a run takes most of an hour."""
    recorded = json.loads(RESULT.read_text()) if RESULT.is_file() else {}
    rows = {old["what"]: old for old in recorded.get(checkpoint, {}).get("rows", [])}
    rows[row["what"]] = row
    recorded[checkpoint] = {
        "tokens": WINDOWS * WINDOW_TOKENS,
        "bound": BOUND,
        "validate": VALIDATE,
        "our_versions": {name: importlib.metadata.version(name) for name in ("torch", "transformers")},
        "rows": list(rows.values()),
    }
    write_json(RESULT, recorded)


def write_windows(checkpoint: Path, text: Path, work: Path) -> tuple[Path, Path]:
    """The token windows every reader scores, and others from the end of the text for calibration."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    lines = text.read_text(encoding="utf-8").splitlines()
    tokens = [token for line in lines for token in tokenizer(json.loads(line)["text"])["input_ids"]]
    needed = (WINDOWS + CALIBRATION_WINDOWS) * WINDOW_TOKENS
    if len(tokens) < needed:
        raise SystemExit(f"{text} has {len(tokens)} tokens; {needed} are needed")
    cut = [tokens[i : i + WINDOW_TOKENS] for i in range(0, len(tokens) - WINDOW_TOKENS, WINDOW_TOKENS)]
    paths = work / "windows.json", work / "calibration.json"
    for path, windows in zip(paths, (cut[:WINDOWS], cut[-CALIBRATION_WINDOWS:]), strict=True):
        write_json(path, windows)
    return paths


class Interchange:
    """One checkpoint, the windows, and the folder where everything is made."""

    def __init__(
        self,
        checkpoint: Path,
        work: Path,
        windows: Path,
        calibration: Path,
        text: Path,
        pythons: dict[str, Path],
    ):
        self.checkpoint, self.work = checkpoint, work
        self.windows, self.calibration, self.text = windows, calibration, text
        self.pythons = pythons

    def rows(self) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
        """What each row compares, and the call that makes it."""
        yield "unquantized", lambda: {"ours": self.ours(self.checkpoint)}
        for kind in ("int4-hqq recipe", *MINMAX):
            for reader in ("compressed-tensors", "llmcompressor"):
                yield f"our {kind}, read by {reader}", partial(self.read_by, reader, kind)
        yield "our torchao INT4 tiles g128, read by torchao", self.loaded_by_torchao
        for reader, export in NVFP4_READERS.items():
            what = f"our nvfp4 recipe in {export}'s form, read by {reader}"
            yield what, partial(self.read_nvfp4_by, reader, export, "nvfp4")
        for reader, export in W4A4_READERS.items():
            what = f"our nvfp4-w4a4 recipe in {export}'s form, read by {reader}"
            yield what, partial(self.read_nvfp4_by, reader, export, "nvfp4-w4a4")
        for scheme in ("W4A16", "W4A16_ASYM", "NVFP4A16", "NVFP4"):
            yield f"llm-compressor {scheme}", partial(self.read_llmcompressor, scheme)
        for scheme in ("W4A16_NVFP4", "NVFP4"):
            yield f"ModelOpt {scheme}", partial(self.read_modelopt, scheme)
        yield "torchao NVFP4", self.read_torchao

    def ours(self, model: Path) -> float:
        loaded = load_model(model, progress=False)
        return nats_per_token(loaded.model, json.loads(self.windows.read_text()))

    def read_by(self, reader: str, kind: str) -> dict[str, Any]:
        folder = self.fresh(f"ours-{kind.replace(' ', '-').replace(',', '')}")
        if kind in MINMAX:
            symmetric, group_sizes = MINMAX[kind]
            source = open_checkpoint(self.checkpoint)
            write_minmax(source, folder, "compressed-tensors", symmetric, group_sizes)
        else:
            quantize(self.checkpoint, "int4-hqq", out=folder, progress=False)
        return compared(self.ours(folder), self.run(reader, "score.py", folder, self.windows))

    def read_nvfp4_by(self, reader: str, export: str, recipe: str) -> dict[str, Any]:
        folder = self.fresh(f"ours-{recipe}-{export}")
        text = self.text if recipe == "nvfp4-w4a4" else None
        quantize(self.checkpoint, recipe, out=folder, export=export, calibration=text, progress=False)
        script = "check_modelopt.py" if reader == "modelopt" else "score.py"
        return compared(self.ours(folder), self.run(reader, script, folder, self.windows))

    def loaded_by_torchao(self) -> dict[str, Any]:
        folder = self.fresh("ours-torchao")
        write_minmax(open_checkpoint(self.checkpoint), folder, "torchao", False, {})
        return compared(self.ours(folder), self.run("torchao", "check_torchao.py", folder, self.windows))

    def read_llmcompressor(self, scheme: str) -> dict[str, Any]:
        folder = self.fresh(f"llmcompressor-{scheme}")
        self.run("llmcompressor", "make_llmcompressor.py", self.checkpoint, folder, scheme, self.calibration)
        return self.validated(folder, self.run("llmcompressor", "score.py", folder, self.windows))

    def read_modelopt(self, scheme: str) -> dict[str, Any]:
        folder = self.fresh(f"modelopt-{scheme}")
        arguments = (self.checkpoint, folder, scheme, self.calibration, self.windows)
        return self.validated(folder, self.run("modelopt", "make_modelopt.py", *arguments))

    def read_torchao(self) -> dict[str, Any]:
        folder = self.fresh("torchao-NVFP4")
        self.run("torchao", "make_torchao.py", self.checkpoint, folder, "NVFP4")
        return self.validated(folder, self.run("torchao", "score.py", folder, self.windows))

    def fresh(self, name: str) -> Path:
        shutil.rmtree(self.work / name, ignore_errors=True)
        return self.work / name

    def run(self, tool: str, script: str, *arguments: object) -> dict[str, Any]:
        """Run one tool's script in its environment; the JSON on its last line that is JSON, if any."""
        command = [str(self.pythons[tool]), str(TOOLS / script), *map(str, arguments)]
        done = self._execute(command)
        if done.returncode != 0:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
        reported = [line for line in done.stdout.splitlines() if line.startswith("{")]
        return json.loads(reported[-1]) if reported else {}

    def validated(self, folder: Path, theirs: dict[str, Any]) -> dict[str, Any]:
        """Our nats beside the maker's, and what `pipeline validate` says: any verdict, reached by serving."""
        entry = compared(self.ours(folder), theirs)
        report = self.fresh(f"report-{folder.name}")
        done = self._execute(
            [
                *(sys.executable, "-P", "-m", "scalegate.pipeline", "validate", str(folder)),
                *("--baseline", str(self.checkpoint), "--report", str(report)),
                *VALIDATE.split(),
            ]
        )
        if not (report / "serving_check.json").is_file():
            return entry | {
                "validate": {"exit": done.returncode, "error": done.stderr[-500:]},
                "holds": False,
            }
        verdict = read_verdict(report / "serving_check.json")
        checks = {check.name: check.status for check in verdict.checks}
        judged = {
            "exit": done.returncode,
            "verdict": verdict.status,
            "read_as": verdict.artifact.quantization,
            "layouts": verdict.artifact.layouts,
            "checks": checks,
        }
        served = all(checks[name] == "pass" for name in MUST_PASS)
        return entry | {"validate": judged, "holds": entry["holds"] and served}

    def _execute(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=self.work)


def write_minmax(
    checkpoint: Checkpoint, out: Path, export: str, symmetric: bool, group_sizes: dict[str, int]
) -> None:
    """A min-max INT4 artifact: the plainest quantizer, since only the writing and the reading are at test."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    convention = EXPORTS[export]
    tensors, specs, shapes = {}, {}, {}
    for name in checkpoint.tensors:
        tensor = checkpoint.read(name)
        module = name.removesuffix(".weight")
        if not module.endswith("_proj"):
            tensors[name] = tensor
            continue
        weight = minmax(tensor, Int4(group_sizes.get(module.rpartition(".")[2], 128), symmetric))
        specs[module], shapes[module] = weight.spec, weight.shape
        tensors.update(convention.tensors(module, weight))
    plain = [name for name in tensors if name in checkpoint.tensors]
    save_file(tensors, out / "model.safetensors", convention.file_metadata(specs, shapes, plain))
    config = checkpoint.config | {"quantization_config": convention.quantization_config(specs, ["lm_head"])}
    write_json(out / "config.json", config)
    for path in checkpoint.other_files().files.values():
        shutil.copy(path, out / path.name)


def minmax(weight: torch.Tensor, spec: Int4) -> Int4Weight:
    n, k = weight.shape
    groups = weight.float().view(n, spec.groups(k), spec.group_size)
    if spec.symmetric:
        scale = (groups.abs().amax(-1) / 7).clamp(min=1e-8).to(torch.bfloat16)
        zero = torch.full_like(scale, 8, dtype=torch.float32)
    else:
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scale = ((high - low) / 15).clamp(min=1e-8).to(torch.bfloat16)
        zero = (-low / scale.float()).round().clamp(0, 15)
    codes = (groups / scale.float().unsqueeze(-1) + zero.unsqueeze(-1)).round().clamp(0, 15)
    return Int4Weight(spec, pack_nibbles(codes.to(torch.uint8).view(n, k)), scale, zero.to(torch.uint8))


def compared(ours: float, theirs: dict[str, Any]) -> dict[str, Any]:
    score = theirs.get("nats_per_token")
    entry = {"ours": ours, "theirs": score, "versions": theirs["versions"]}
    if score is None:
        return entry | {"loaded": {key: theirs[key] for key in ("packed", "plain")}}
    difference = abs(ours - score)
    return entry | {"runtime": theirs["runtime"], "difference": difference, "holds": difference <= BOUND}


def as_line(entry: dict[str, Any]) -> str:
    theirs, judged = entry.get("theirs"), entry.get("validate")
    compared = f"{theirs:.5f}  {entry['difference']:.5f}" if theirs is not None else "not run"
    verdict = f"  {judged.get('verdict') or judged['error']}" if judged else ""
    holds = "" if entry.get("holds", True) else "  DOES NOT HOLD"
    return f"{entry['what']:<58} {entry['ours']:.5f}  {compared}{verdict}{holds}"


if __name__ == "__main__":
    main()
