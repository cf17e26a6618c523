"""pytorch/ao #3496 replayed: an INT4 checkpoint laid out for tinygemm fails the gate, laid out again passes.

    python -P tests/bench/gate/replay.py --out OUT/replay.json

The checkpoint has Qwen3-8B's layers, fewer of them, random weights and the bundled checkpoint's tokenizer.
Random weights say nothing about quality, so the recipe opens those bounds, and the verdict shows it; every
other check is the gate's own. Both runs of the gate are given the same server of the baseline. On a machine
without a GPU: `--device cpu --bad cpu_int4_float32` and a small `--hidden`.
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from scalegate.base.atomic_files import write_json
from scalegate.pipeline.commands.layout import layout
from scalegate.pipeline.commands.quantize import quantize
from scalegate.pipeline.commands.validate import validate
from scalegate.pipeline.validation.servers import server_of, sized_options
from scalegate.serving_check.adapters.all_engines import DEFAULT_ENGINE
from scalegate.serving_check.adapters.engine import ServerJob
from scalegate.serving_check.evidence.verdict import Verdict
from scalegate.serving_check.settings import WorkloadSettings
from transformers import AutoModelForCausalLM, Qwen3Config

TOKENIZER = Path(__file__).parents[3] / "examples" / "qwen3-pycode-5m"
RECIPE = """\
description: INT4 for random weights, whose quality is nobody's.
format: int4
group_size: 128
max_mean_kl: 100
max_extra_nats: 100
min_top1_agreement: 0.000001
max_canary_extra_nats: 100
"""


def make_checkpoint(folder: Path, hidden: int, layers: int, device: str) -> None:
    vocabulary = json.loads((TOKENIZER / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    heads = hidden // 128
    config = Qwen3Config(
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 4),
        head_dim=128,
        vocab_size=vocabulary,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    for path in TOKENIZER.glob("tokenizer*.json"):
        shutil.copy(path, folder)


def told(verdict: Verdict) -> dict[str, object]:
    for check in verdict.checks:
        print(f"  {check.status:12} {check.name}: {check.reason}", flush=True)
    return {
        "status": verdict.status,
        "layouts": verdict.artifact.layouts,
        "ratios": {point.m: point.ratio for point in verdict.curve},
        "throughput": next(check.reason for check in verdict.checks if check.name == "throughput"),
        "seconds": verdict.duration_seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--bad", default="tinygemm", help="the layout that the checkpoint first gets")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--m", default="1,8,32", help="comma-separated; requests at once in the gate")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    ms = tuple(int(m) for m in options.m.split(","))
    record: dict[str, object] = {"laid_out_as": options.bad, "layers": options.layers, "ms": ms}

    def done(step: str, value: object) -> None:
        """Written after every step: what a run cut short has found is kept."""
        record[step] = value
        print(f"{time.perf_counter() - started:.0f} s: {step}", flush=True)
        if options.out:
            write_json(options.out, record)

    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary:
        source, artifact, recipe = (Path(temporary) / name for name in ("source", "artifact", "random.yaml"))
        recipe.write_text(RECIPE, encoding="utf-8")
        make_checkpoint(source, options.hidden, options.layers, options.device)
        done("checkpoint made", True)
        sized = sized_options({"device": options.device}, WorkloadSettings(ms))
        server = server_of(
            ServerJob(
                DEFAULT_ENGINE, "baseline", source, sized, Path(temporary) / "baseline.log", progress=False
            )
        )
        try:
            with ThreadPoolExecutor(1) as beside:
                starting = beside.submit(server.start)
                quantize(source, recipe, artifact, device=options.device, progress=False)
            done("quantized, and its baseline served", True)
            gate = {"m": ms, "device": options.device, "progress": False, "quality_tokens": 1024}
            gate["baseline_engine"] = starting.result().base_url

            layout(artifact, force=options.bad, device=options.device, progress=False)
            done("laid out", options.bad)
            before = told(validate(artifact, **gate))
            done("before", before)

            relaid = layout(artifact, device=options.device, progress=False)
            picks = {choice.shape: f"{choice.layout}: {choice.reason}" for choice in relaid.plan.choices}
            done("laid out again", picks)
            after = told(validate(artifact, **gate))
            done("after", after)
        finally:
            server.stop()
    sys.exit(0 if (before["status"], after["status"]) == ("fail", "pass") else 1)


if __name__ == "__main__":
    main()
