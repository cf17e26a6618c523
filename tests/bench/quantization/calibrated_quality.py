"""Our formats beside llm-compressor's, ModelOpt's and auto-round's, by extra nats and KL.

    python -P tests/bench/quantization/calibrated_quality.py CHECKPOINT... --calibration TEXT.jsonl \
        --heldout TEXT.jsonl \
        --work DIR --out OUT/calibrated_quality.json

Everybody quantizes all linear layers but lm_head, calibrated on the same sequences of 512 tokens; AWQ
reads 128 of them, as llm-compressor's own examples do. Each tool runs in an environment of its own, and
what it wrote is read back by our readers, norms included; inputs are rounded as each checkpoint says. Models
are evaluated in float32 on windows of `--context` tokens. A slice of the text is scored at a time, by all
subjects that are there, and recorded: a run that was stopped goes on, and figures are over the slices that
all have read.
`--against SUBJECT...` gives each subject's distance from those, with the standard error of the paired
differences of slices. `--subjects` leaves out what takes long; `--others NAME=TEXT.jsonl` adds `int4-gptq,
NAME`, calibrated on a text of another kind.
"""

import argparse
import json
import subprocess
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file
from scalegate.base.atomic_files import write_json
from scalegate.layouts.formats.e4m3 import E4M3_MAX, PER_BLOCK, PER_TOKEN, E4M3StaticInput
from scalegate.layouts.formats.input_format import InputFormat
from scalegate.layouts.formats.int8 import Int8
from scalegate.layouts.formats.weight_format import WeightFormat
from scalegate.pipeline.checkpoints.checkpoint import open_checkpoint
from scalegate.pipeline.commands.quantize import quantize
from scalegate.pipeline.model_loader.load_model import load_model
from scalegate.pipeline.quantization.budget import sensitivity
from scalegate.pipeline.quantization.budget.sensitivity import candidates as all_candidates
from scalegate.pipeline.quantization.calibration.calibration_text import read_calibration_text
from scalegate.serving_check.quality import read_texts, token_windows
from scalegate.tests.bench.quantization.interchange_tools.environments import (
    CALIBRATED,
    REQUIREMENTS,
    make_environments,
)
from torch import Tensor

TOOLS = Path(__file__).parent / "interchange_tools"

DYNAMIC = {"token": PER_TOKEN, "block": PER_BLOCK}
SLICE_WINDOWS = 8
AWQ_SEQUENCES = 128
OURS: dict[str, dict[str, Any]] = {
    "int4-hqq": {"recipe": "int4-hqq"},
    "int4-gptq": {"recipe": "int4-gptq", "calibration": "text"},
    "int4-awq": {"recipe": "int4-awq", "calibration": "text"},
    "int4-awq-gptq": {"recipe": "int4-awq-gptq", "calibration": "text"},
    "int4-best": {"recipe": "int4-best", "calibration": "text"},
    "int4-best, self": {"recipe": "int4-best", "calibration": "self"},
    "int4-gptq, self": {"recipe": "int4-gptq", "calibration": "self"},
    "int4-gptq, 4.5 bits": {"recipe": "int4-gptq", "calibration": "text", "target_bits": 4.5},
    "int8": {"recipe": "int8"},
    "int4-hqq, 4.5 bits": {"recipe": "int4-hqq", "calibration": "text", "target_bits": 4.5},
    "int4-hqq, 5.5 bits": {"recipe": "int4-hqq", "calibration": "text", "target_bits": 5.5},
    "int4-hqq, 4.5 bits without INT8": {"recipe": "int4-hqq", "calibration": "text", "target_bits": 4.5},
    "int4-hqq, 5.5 bits without INT8": {"recipe": "int4-hqq", "calibration": "text", "target_bits": 5.5},
    "nvfp4": {"recipe": "nvfp4"},
    "nvfp4-gptq": {"recipe": "nvfp4-gptq", "calibration": "text"},
    "nvfp4-gptq, self": {"recipe": "nvfp4-gptq", "calibration": "self"},
    "nvfp4-best": {"recipe": "nvfp4-best", "calibration": "text"},
    "nvfp4-best, self": {"recipe": "nvfp4-best", "calibration": "self"},
    "fp8": {"recipe": "fp8"},
    "fp8-block": {"recipe": "fp8-block"},
    "fp8-static": {"recipe": "fp8-static", "calibration": "text"},
    "mxfp8": {"recipe": "mxfp8"},
    "int8-w8a8": {"recipe": "int8-w8a8"},
    "int4-symmetric": {"recipe": "int4-symmetric"},
    "int4-fp8": {"recipe": "int4-fp8"},
    "int4-fp8-gptq": {"recipe": "int4-fp8-gptq", "calibration": "text"},
    "int4-fp8-best": {"recipe": "int4-fp8-best", "calibration": "text"},
    "mxfp4": {"recipe": "mxfp4"},
    "mxfp4-gptq": {"recipe": "mxfp4-gptq", "calibration": "text"},
    "mxfp4-best": {"recipe": "mxfp4-best", "calibration": "text"},
}
WITHOUT_INT8 = "without INT8"
"""Ends the names of those whose budget chooses among INT4 and 16 bits alone."""
OTHER = "int4-gptq"
"""The recipe that is calibrated on texts of other kinds."""
LLM_COMPRESSOR = "make_llmcompressor_calibrated.py"
MODELOPT, MODELOPT_8 = "make_modelopt_calibrated.py", "make_modelopt_eight_bits.py"
THEIRS = {
    "llm-compressor GPTQ, INT4": ("llmcompressor", LLM_COMPRESSOR, ("gptq", "W4A16_ASYM")),
    "llm-compressor AWQ, INT4": ("llmcompressor", LLM_COMPRESSOR, ("awq", "W4A16_ASYM")),
    "llm-compressor, NVFP4A16": ("llmcompressor", LLM_COMPRESSOR, ("ptq", "NVFP4A16")),
    "llm-compressor GPTQ, NVFP4A16": ("llmcompressor", LLM_COMPRESSOR, ("gptq", "NVFP4A16")),
    "ModelOpt, NVFP4": ("modelopt", MODELOPT, ("max",)),
    "ModelOpt AWQ-lite, NVFP4": ("modelopt", MODELOPT, ("awq_lite",)),
    "ModelOpt local Hessian, NVFP4": ("modelopt", MODELOPT, ("local_hessian",)),
    "auto-round-best, INT4": ("auto-round", "make_autoround.py", ()),
    "llm-compressor, FP8": ("llmcompressor", LLM_COMPRESSOR, ("ptq", "FP8_DYNAMIC")),
    "llm-compressor, FP8 block": ("llmcompressor", LLM_COMPRESSOR, ("ptq", "FP8_BLOCK")),
    "llm-compressor, FP8 static": ("llmcompressor", LLM_COMPRESSOR, ("static", "FP8")),
    "llm-compressor, MXFP8": ("llmcompressor", LLM_COMPRESSOR, ("ptq", "MXFP8")),
    "llm-compressor, INT8 W8A8": ("llmcompressor", LLM_COMPRESSOR, ("ptq", "INT8")),
    "llm-compressor, W4A8": ("llmcompressor", LLM_COMPRESSOR, ("ptq", "W4AFP8")),
    "llm-compressor GPTQ, W4A8": ("llmcompressor", LLM_COMPRESSOR, ("gptq", "W4AFP8")),
    "llm-compressor, MXFP4": ("llmcompressor", LLM_COMPRESSOR, ("ptq", "MXFP4A16")),
    "llm-compressor GPTQ, MXFP4": ("llmcompressor", LLM_COMPRESSOR, ("gptq", "MXFP4A16")),
    "ModelOpt, FP8": ("modelopt", MODELOPT_8, ("fp8-rows",)),
    "ModelOpt, FP8 block": ("modelopt", MODELOPT_8, ("fp8-blocks",)),
    "ModelOpt, FP8 static": ("modelopt", MODELOPT_8, ("fp8",)),
    "ModelOpt AWQ, W4A8": ("modelopt", MODELOPT_8, ("w4a8-awq",)),
    "ModelOpt, MXFP4": ("modelopt", MODELOPT_8, ("mxfp4-weights",)),
}


def candidates(int8: bool, spec: WeightFormat) -> list[WeightFormat]:
    """What a budget may choose from for `spec`."""
    return [candidate for candidate in all_candidates(spec) if int8 or not isinstance(candidate, Int8)]


def make(name: str, checkpoint: Path, work: Path, options: argparse.Namespace) -> None:
    """The subject's checkpoint in `work`, and how long it took; made once."""
    folder, done = work / name, work / f"{name}.json"
    if done.is_file():
        return
    begun, begun_cpu = time.perf_counter(), time.process_time()
    other = name.removeprefix(f"{OTHER}, ")
    if name in OURS or other in options.others:
        asked = dict(OURS.get(name) or {"recipe": OTHER, "calibration": options.others[other]})
        if asked.get("calibration") == "text":
            asked["calibration"] = options.calibration
        with patch.object(sensitivity, "candidates", partial(candidates, not name.endswith(WITHOUT_INT8))):
            quantize(checkpoint, out=folder, device="cpu", progress=False, **asked)
        spent = {"seconds": time.perf_counter() - begun, "cpu_seconds": time.process_time() - begun_cpu}
    else:
        tool, script, arguments = THEIRS[name]
        environments = options.environments or options.work / "environments"
        wanted = {tool: (REQUIREMENTS | CALIBRATED)[tool]}
        python = make_environments(environments, wanted)[tool]
        sequences = read_calibration_text(open_checkpoint(checkpoint), str(options.calibration)).sequences
        windows = [] if sequences is None else sequences.tolist()
        few = windows[:: max(1, len(windows) // AWQ_SEQUENCES)][:AWQ_SEQUENCES]
        write_json(work / "windows.json", few if {"awq", "awq_lite", "w4a8-awq"} & {*arguments} else windows)
        command = [python, TOOLS / script, checkpoint, folder, *arguments, work / "windows.json"]
        subprocess.run(list(map(str, command)), check=True)
        spent = json.loads((folder / "spent.json").read_text())
    write_json(done, {kind: round(value, 1) for kind, value in spent.items()})


def model_of(folder: Path) -> torch.nn.Module:
    """The model that a checkpoint describes, in float32, with inputs rounded as it says."""
    notes = folder / "inputs.safetensors"
    if not notes.is_file():
        released = replace(open_checkpoint(folder), as_released=True)
        return load_model(released, dtype=torch.float32, progress=False).model.eval()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with safe_open(notes, "pt") as file:
        kind = file.metadata()["kind"]
    tensors = load_file(notes)
    for name, largest in tensors.items():
        layer, _, part = name.rpartition(".")
        if part == "largest":
            rounding = E4M3StaticInput(largest / E4M3_MAX) if kind == "tensor" else DYNAMIC[kind]
            factors = tensors.get(f"{layer}.factors", torch.ones(()))
            model.get_submodule(layer).register_forward_pre_hook(partial(rounded, rounding, factors))
    return model


def rounded(rounding: InputFormat, factors: Tensor, module: torch.nn.Module, inputs: tuple[Tensor]) -> Tensor:
    """A layer's input, multiplied and rounded."""
    return rounding.round(inputs[0] * factors)


@torch.inference_mode()
def score(
    model: torch.nn.Module, windows: list[Tensor], expected: list[Tensor] | None
) -> tuple[list[Tensor], Tensor]:
    """Log probabilities, fp16 [T-1, vocab] each, and [tokens, 3]: nats, KL from `expected`, same first."""
    kept, figures = [], []
    for index, window in enumerate(windows):
        log_q = model(window[None], use_cache=False).logits[0, :-1].float().log_softmax(-1)
        nats = -log_q.gather(-1, window[1:, None])[:, 0]
        if expected is None:
            kept.append(log_q.half())
            figures.append(torch.stack([nats, torch.zeros_like(nats), torch.ones_like(nats)], 1))
            continue
        log_p = expected[index].float()
        kl = (log_p.exp() * (log_p - log_q)).sum(-1)
        figures.append(torch.stack([nats, kl, (log_p.argmax(-1) == log_q.argmax(-1)).float()], 1))
    return kept, torch.cat(figures)


def measure(checkpoint: Path, options: argparse.Namespace, results: dict[str, Any]) -> None:
    work = (options.work / checkpoint.name).resolve()
    work.mkdir(parents=True, exist_ok=True)
    names = [name for name in (*OURS, *THEIRS) if not options.subjects or name in options.subjects]
    names += [f"{OTHER}, {name}" for name in options.others]
    for name in names:
        print(checkpoint.name, name, flush=True)
        make(name, checkpoint, work, options)
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    windows = token_windows(tokenizer, read_texts(options.heldout), options.context)
    models = {"unquantized": model_of(checkpoint)} | {name: model_of(work / name) for name in names}
    for start in range(0, len(windows), SLICE_WINDOWS):
        part = windows[start : start + SLICE_WINDOWS]
        expected: list[Tensor] | None = None
        for name in ("unquantized", *names):
            path = work / "scores" / f"{name}-{options.context}-{start}.pt"
            if path.is_file() and name != "unquantized":
                continue
            if name == "unquantized" and all(
                (work / "scores" / f"{name}-{options.context}-{start}.pt").is_file() for name in names
            ):
                continue
            kept, figures = score(models[name], part, expected)
            expected = kept or expected
            path.parent.mkdir(exist_ok=True)
            torch.save(figures, path)
        report(checkpoint, work, names, start // SLICE_WINDOWS + 1, len(windows), options, results)


def report(
    checkpoint: Path, work: Path, names: list[str], slices: int, windows: int,
    options: argparse.Namespace, results: dict[str, Any],
) -> None:  # fmt: skip
    """Write down what all subjects have read so far."""

    def parts(name: str) -> list[Tensor]:
        return [
            torch.load(work / "scores" / f"{name}-{options.context}-{i * SLICE_WINDOWS}.pt").double()
            for i in range(slices)
        ]

    def figures(name: str) -> Tensor:
        return torch.cat(parts(name))

    def apart(name: str, other: str) -> dict[str, float]:
        """How far from `other`: nats and KL, slice by slice, and the standard error of that."""
        pairs = zip(parts(name), parts(other), strict=True)
        differences = torch.stack([(figures - held).mean(0)[:2] for figures, held in pairs])
        error = differences.std(0) / len(differences) ** 0.5
        return {
            f"{kind}{what}": float(values[index])
            for what, values in (("", differences.mean(0)), ("_standard_error", error))
            for index, kind in enumerate(("nats", "kl"))
        }

    used = {THEIRS[name][0] for name in names if name in THEIRS}
    held = [other for other in options.against if other in names]
    plain = figures("unquantized")
    cells = {}
    for name in names:
        found = figures(name)
        cells[name] = {
            "extra_nats_per_token": float((found[:, 0] - plain[:, 0]).mean()),
            "mean_kl": float(found[:, 1].mean()),
            "p99_kl": float(found[:, 1].quantile(0.99)),
            "top1_agreement": float(found[:, 2].mean()),
            **({"apart": {other: apart(name, other) for other in held}} if held and slices > 1 else {}),
            **json.loads((work / f"{name}.json").read_text()),
        }
    results[checkpoint.name] = {
        "tokens": len(plain),
        "windows": f"{min(slices * SLICE_WINDOWS, windows)} of {windows}",
        "nats_per_token": float(plain[:, 0].mean()),
        "subjects": cells,
    }
    write_json(
        options.out,
        {
            "context": options.context,
            "evaluated_in": "float32",
            "torch": torch.__version__,
            "tools": {tool: list((REQUIREMENTS | CALIBRATED)[tool]) for tool in sorted(used)},
            "checkpoints": results,
        },
    )


def table(results: Mapping[str, Any]) -> None:
    for name, entry in results.items():
        print(f"\n{name}, {entry['tokens']} tokens, {entry['windows']} windows")
        print(f"{'':32}{'extra nats':>12}{'mean KL':>12}{'p99':>10}{'seconds':>10}")
        for subject, cell in entry["subjects"].items():
            print(
                f"{subject:32}{cell['extra_nats_per_token']:12.6f}{cell['mean_kl']:12.6f}"
                f"{cell['p99_kl']:10.4f}{cell['seconds']:10.1f}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoints", nargs="+", type=Path)
    parser.add_argument("--calibration", type=Path, required=True)
    parser.add_argument("--heldout", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True, help="folder for what the tools make")
    parser.add_argument("--environments", type=Path, help="folder of their environments; default in WORK")
    parser.add_argument("--subjects", nargs="*", help="only these")
    parser.add_argument("--others", nargs="*", default=[], metavar="NAME=TEXT", help="texts of other kinds")
    parser.add_argument("--against", nargs="*", default=[], help="subjects that all are held against")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.others = dict(word.split("=", 1) for word in options.others)
    results = json.loads(options.out.read_text())["checkpoints"] if options.out.is_file() else {}
    for path in options.checkpoints:
        measure(path.resolve(), options, results)
    table(results)


if __name__ == "__main__":
    main()
