"""Do we read other tools' checkpoints as they do, and do they read ours: nats per token on the same windows.

Each tool runs in an environment of its own, given as its Python; a tool left out is left out of the result.
The one with compressed-tensors needs a transformers other than 5.23.0, which by default loads no asymmetric
checkpoint at all, llm-compressor's own included: it expects the zero points unpacked.

    python tests/bench/interchange.py --checkpoint CHECKPOINT --text heldout.jsonl --work DIR \\
        --compressed-tensors ENV/bin/python --llmcompressor ENV/bin/python \\
        --modelopt ENV/bin/python --torchao ENV/bin/python
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from scalegate.layouts.files import write_json
from scalegate.layouts.int4 import Int4Weight, pack_nibbles
from scalegate.pipeline.checkpoint import Checkpoint, open_checkpoint
from scalegate.pipeline.conventions.all_conventions import EXPORTS
from scalegate.pipeline.load import load_model
from scalegate.pipeline.quantize import quantize
from transformers import AutoTokenizer

TOOLS = Path(__file__).parent / "interchange_tools"
RESULT = Path(__file__).parent / "results" / "interchange.json"
BOUND = 0.002
WINDOWS, WINDOW_TOKENS, CALIBRATION_WINDOWS = 64, 256, 8
sys.path.insert(0, str(TOOLS))
from score import nats_per_token  # noqa: E402 - the same arithmetic that the other environments run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True, help="folder for the checkpoints that are made")
    for tool in ("compressed-tensors", "llmcompressor", "modelopt", "torchao"):
        parser.add_argument(f"--{tool}", help=f"the Python of an environment with {tool}")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    bench = Interchange(options.checkpoint, options.work, *write_windows(options))
    rows = [bench.unquantized(), *bench.others_read_ours(options), *bench.we_read_others(options)]
    print_table(rows)
    recorded = json.loads(RESULT.read_text()) if RESULT.is_file() else {}
    recorded[options.checkpoint.name] = {"tokens": WINDOWS * WINDOW_TOKENS, "bound": BOUND, "rows": rows}
    write_json(RESULT, recorded)


def write_windows(options: argparse.Namespace) -> tuple[Path, Path]:
    """The token windows every reader scores, and others from the end of the text for calibration."""
    tokenizer = AutoTokenizer.from_pretrained(options.checkpoint)
    lines = options.text.read_text(encoding="utf-8").splitlines()
    tokens = [token for line in lines for token in tokenizer(json.loads(line)["text"])["input_ids"]]
    needed = (WINDOWS + CALIBRATION_WINDOWS) * WINDOW_TOKENS
    if len(tokens) < needed:
        raise SystemExit(f"{options.text} has {len(tokens)} tokens; {needed} are needed")
    cut = [tokens[i : i + WINDOW_TOKENS] for i in range(0, len(tokens) - WINDOW_TOKENS, WINDOW_TOKENS)]
    paths = options.work / "windows.json", options.work / "calibration.json"
    for path, windows in zip(paths, (cut[:WINDOWS], cut[-CALIBRATION_WINDOWS:]), strict=True):
        write_json(path, windows)
    return paths


class Interchange:
    """One checkpoint, the windows, and the folder where everything is made."""

    def __init__(self, checkpoint: Path, work: Path, windows: Path, calibration: Path):
        self.checkpoint, self.work = checkpoint, work
        self.windows, self.calibration = windows, calibration

    def ours(self, model: Path) -> float:
        loaded = load_model(model, progress=False)
        return nats_per_token(loaded.model, json.loads(self.windows.read_text()))

    def unquantized(self) -> dict[str, Any]:
        return {"what": "unquantized", "ours": self.ours(self.checkpoint)}

    def others_read_ours(self, options: argparse.Namespace) -> list[dict[str, Any]]:
        kinds = {
            "symmetric g128": (True, {}),
            "asymmetric g128": (False, {}),
            "asymmetric g128, down_proj g64": (False, {"down_proj": 64}),
        }
        folders = {"int4-hqq recipe": self.fresh("ours-int4-hqq")}
        quantize(self.checkpoint, "int4-hqq", out=folders["int4-hqq recipe"], progress=False)
        for kind, (symmetric, group_sizes) in kinds.items():
            folders[kind] = self.work / f"ours-{kind.replace(' ', '-').replace(',', '')}"
            source = open_checkpoint(self.checkpoint)
            write_minmax(source, folders[kind], "compressed-tensors", symmetric, group_sizes)
        rows = []
        for kind, folder in folders.items():
            ours = self.ours(folder)
            for reader in ("compressed-tensors", "llmcompressor"):
                python = getattr(options, reader.replace("-", "_"))
                if python:
                    theirs = self.run(python, "score.py", folder, self.windows)
                    rows.append(row(f"our {kind}, read by {reader}", ours, theirs))
        if options.torchao:
            folder = self.work / "ours-torchao"
            write_minmax(open_checkpoint(self.checkpoint), folder, "torchao", False, {})
            theirs = self.run(options.torchao, "check_torchao.py", folder, self.windows)
            rows.append(row("our torchao INT4 tiles g128, read by torchao", self.ours(folder), theirs))
        return rows

    def we_read_others(self, options: argparse.Namespace) -> list[dict[str, Any]]:
        rows = []
        if options.llmcompressor:
            for scheme in ("W4A16", "W4A16_ASYM", "NVFP4A16", "NVFP4"):
                folder = self.fresh(f"llmcompressor-{scheme}")
                python = options.llmcompressor
                self.run(python, "make_llmcompressor.py", self.checkpoint, folder, scheme, self.calibration)
                theirs = self.run(python, "score.py", folder, self.windows, "--weights-only")
                rows.append(row(f"llm-compressor {scheme}", self.ours(folder), theirs))
                if scheme == "NVFP4":
                    # The same weights with its activations quantized as well, which is not what we serve.
                    activations = self.run(python, "score.py", folder, self.windows)
                    rows[-1]["theirs_with_quantized_activations"] = activations["nats_per_token"]
        if options.modelopt:
            for scheme in ("W4A16_NVFP4", "NVFP4"):
                folder = self.fresh(f"modelopt-{scheme}")
                arguments = (self.checkpoint, folder, scheme, self.calibration, self.windows)
                theirs = self.run(options.modelopt, "make_modelopt.py", *arguments)
                rows.append(row(f"ModelOpt {scheme}", self.ours(folder), theirs))
        if options.torchao:
            folder = self.fresh("torchao-NVFP4")
            self.run(options.torchao, "make_torchao.py", self.checkpoint, folder, "NVFP4")
            theirs = self.run(options.torchao, "score.py", folder, self.windows)
            rows.append(row("torchao NVFP4", self.ours(folder), theirs))
        return rows

    def fresh(self, name: str) -> Path:
        shutil.rmtree(self.work / name, ignore_errors=True)
        return self.work / name

    def run(self, python: str, script: str, *arguments: object) -> dict[str, Any]:
        """Run one tool's script in its environment; the JSON on its last line that is JSON, if any."""
        command = [python, str(TOOLS / script), *map(str, arguments)]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=self.work)
        if done.returncode != 0:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
        reported = [line for line in done.stdout.splitlines() if line.startswith("{")]
        return json.loads(reported[-1]) if reported else {}


def write_minmax(
    checkpoint: Checkpoint, out: Path, export: str, symmetric: bool, group_sizes: dict[str, int]
) -> None:
    """A min-max INT4 artifact: the plainest quantizer, since only the writing and the reading are at test."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    convention = EXPORTS[export]
    tensors, modules, shapes = {}, {}, {}
    for name in checkpoint.tensors:
        tensor = checkpoint.read(name)
        module = name.removesuffix(".weight")
        if not module.endswith("_proj"):
            tensors[name] = tensor
            continue
        weight = minmax(tensor, group_sizes.get(module.rpartition(".")[2], 128), symmetric)
        modules[module], shapes[module] = weight.group_size, weight.shape
        tensors.update(convention.tensors(module, weight, symmetric))
    plain = [name for name in tensors if name in checkpoint.tensors]
    save_file(tensors, out / "model.safetensors", convention.file_metadata(modules, shapes, plain))
    config = checkpoint.config | {
        "quantization_config": convention.quantization_config(modules, symmetric, ["lm_head"])
    }
    write_json(out / "config.json", config)
    for path in checkpoint.other_files():
        shutil.copy(path, out / path.name)


def minmax(weight: torch.Tensor, group_size: int, symmetric: bool) -> Int4Weight:
    n, k = weight.shape
    groups = weight.float().view(n, k // group_size, group_size)
    if symmetric:
        scale = (groups.abs().amax(-1) / 7).clamp(min=1e-8).to(torch.bfloat16)
        zero = torch.full_like(scale, 8, dtype=torch.float32)
    else:
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scale = ((high - low) / 15).clamp(min=1e-8).to(torch.bfloat16)
        zero = (-low / scale.float()).round().clamp(0, 15)
    codes = (groups / scale.float().unsqueeze(-1) + zero.unsqueeze(-1)).round().clamp(0, 15)
    return Int4Weight(pack_nibbles(codes.to(torch.uint8).view(n, k)), scale, zero.to(torch.uint8), group_size)


def row(what: str, ours: float, theirs: dict[str, Any]) -> dict[str, Any]:
    score = theirs.get("nats_per_token")
    result = {"what": what, "ours": ours, "theirs": score, "versions": theirs["versions"]}
    if score is None:
        return result | {"loaded": {key: theirs[key] for key in ("packed", "plain")}}
    return result | {"difference": abs(ours - score), "within_bound": abs(ours - score) <= BOUND}


def print_table(rows: list[dict[str, Any]]) -> None:
    for entry in rows:
        theirs = entry.get("theirs")
        compared = f"{theirs:.5f}  {entry['difference']:.5f}" if theirs is not None else "not run"
        print(f"{entry['what']:<58} {entry['ours']:.5f}  {compared}")


if __name__ == "__main__":
    main()
