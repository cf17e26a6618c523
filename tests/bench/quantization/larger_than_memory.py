"""Quantizing a checkpoint of a terabyte: seconds to plan, and the memory of planning and of the first shards.

On a machine that does other work as well, `plan_cpu_seconds` is the figure to compare.

    python -P tests/bench/quantization/larger_than_memory.py --out OUT/larger_than_memory.json

A mixture of experts (Qwen3's architecture, 384 experts of 2,048 by 7,168, some 35,000 weights a terabyte) in
safetensors files with real headers and no data: sparse files, which read as zeros. The digest of the source,
for which all of it is read once, is not in here. `--terabytes` takes several, to show what grows how.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scalegate.base.atomic_files import write_json

RESULT = Path(__file__).parents[1] / "results" / "quantization" / "larger_than_memory.json"
HIDDEN, EXPERT, EXPERTS, VOCABULARY = 7168, 2048, 384, 151936
SHARD_BYTES = 5 << 30
MOST_SECONDS, MOST_BYTES = 60, 2 << 30
"""The bars: for planning, and of memory at its peak."""

Shapes = dict[str, tuple[int, ...]]


def sparse_checkpoint(folder: Path, nbytes: int) -> int:
    """Write a checkpoint of about `nbytes` that takes next to no disk; its bytes."""
    folder.mkdir()
    layers = max(1, round(nbytes / (2 * EXPERTS * 3 * EXPERT * HIDDEN)))
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "dtype": "bfloat16",
        "hidden_size": HIDDEN,
        "intermediate_size": EXPERT,
        "moe_intermediate_size": EXPERT,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 8,
        "num_hidden_layers": layers,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": False,
    }
    write_json(folder / "config.json", config)
    weight_map = {}
    total = 0
    for number, shapes in enumerate(_shards(layers), start=1):
        name = f"model-{number:05d}.safetensors"
        total += _write_sparse(folder / name, shapes)
        weight_map |= dict.fromkeys(shapes, name)
    write_json(
        folder / "model.safetensors.index.json",
        {"metadata": {"total_size": total}, "weight_map": weight_map},
    )
    return total


def _shards(layers: int) -> Iterator[Shapes]:
    group: Shapes = {}
    for name, shape in _shapes(layers):
        if sum(map(_size, group.values())) + _size(shape) > SHARD_BYTES:
            yield group
            group = {}
        group[name] = shape
    yield group


def _shapes(layers: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "model.embed_tokens.weight", (VOCABULARY, HIDDEN)
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        for name, rows in (("q_proj", 64 * 128), ("k_proj", 8 * 128), ("v_proj", 8 * 128)):
            yield f"{prefix}.self_attn.{name}.weight", (rows, HIDDEN)
        yield f"{prefix}.self_attn.o_proj.weight", (HIDDEN, 64 * 128)
        for name in ("q_norm", "k_norm"):
            yield f"{prefix}.self_attn.{name}.weight", (128,)
        yield f"{prefix}.mlp.gate.weight", (EXPERTS, HIDDEN)
        for expert in range(EXPERTS):
            for name in ("gate_proj", "up_proj"):
                yield f"{prefix}.mlp.experts.{expert}.{name}.weight", (EXPERT, HIDDEN)
            yield f"{prefix}.mlp.experts.{expert}.down_proj.weight", (HIDDEN, EXPERT)
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}.{name}.weight", (HIDDEN,)
    yield "model.norm.weight", (HIDDEN,)
    yield "lm_head.weight", (VOCABULARY, HIDDEN)


def _size(shape: tuple[int, ...]) -> int:
    return 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)


def _write_sparse(path: Path, shapes: Shapes) -> int:
    entries: dict[str, Any] = {}
    position = 0
    for name, shape in shapes.items():
        end = position + _size(shape)
        entries[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [position, end]}
        position = end
    header = json.dumps(entries).encode()
    with open(path, "wb") as file:
        file.write(len(header).to_bytes(8, "little"))
        file.write(header)
        file.truncate(8 + len(header) + position)
    return position


def plan_and_begin(source: Path, out: Path, recipe: str, nbytes: int, shard_bytes: int) -> dict[str, Any]:
    """Plan all of it and write shards made of the first `nbytes` or so; this process's figures."""
    from scalegate.pipeline.checkpoints.checkpoint import open_checkpoint
    from scalegate.pipeline.quantization.job import prepare
    from scalegate.pipeline.quantization.shards.ranks import join_ranks
    from scalegate.pipeline.quantization.shards.tasks import source_bytes
    from scalegate.pipeline.quantization.shards.work_record import PARTS_FOLDER, WorkRecord
    from scalegate.pipeline.quantization.write_shards import PassResults, divide_into_shards, write_shards
    from scalegate.pipeline.records.recipe_file import load_recipe

    imported = _peak_bytes()
    started, computed = time.perf_counter(), time.process_time()
    checkpoint = open_checkpoint(source)
    job = prepare(checkpoint, load_recipe(recipe), None, "cpu")
    shards = divide_into_shards(job, shard_bytes)
    planned, planned_cpu = time.perf_counter() - started, time.process_time() - computed
    planning_peak = _peak_bytes()
    chosen, read = {}, 0
    for name, tasks in shards.items():
        if read >= nbytes:
            break
        if not any(task.is_quantized for task in tasks):
            continue  # copied: no work
        chosen[name] = tasks
        read += sum(source_bytes(checkpoint, task) for task in tasks)
    out.mkdir()
    started = time.perf_counter()
    write_shards(
        job, WorkRecord(out, {}), chosen, PassResults({}, {}, {}, {}, {}), join_ranks(), progress=False
    )
    written = time.perf_counter() - started
    parts = [path.stat().st_size for path in (out / PARTS_FOLDER).iterdir()]
    quantized = sum(task.is_quantized for tasks in chosen.values() for task in tasks)
    return {
        "source_bytes": checkpoint.nbytes,
        "tensors": len(checkpoint.tensors),
        "shards": len(shards),
        "plan_seconds": round(planned, 2),
        "plan_cpu_seconds": round(planned_cpu, 2),
        "imports_peak_bytes": imported,
        "planning_peak_bytes": planning_peak,
        "read_bytes": read,
        "write_seconds": round(written, 1),
        "peak_bytes": _peak_bytes(),
        "record_bytes_a_weight": round(sum(parts) / max(1, quantized)),
    }


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measured(
    terabytes: float,
    recipe: str = "int4-hqq",
    nbytes: int = 2 * 10**9,
    shard_bytes: int = 1 << 30,
    folder: Path | None = None,
) -> dict[str, Any]:
    """In a process of its own, whose peak is its own."""
    with tempfile.TemporaryDirectory(dir=folder) as work:
        source, out = Path(work) / "source", Path(work) / "out"
        sparse_checkpoint(source, int(terabytes * 1e12))
        words = ["--begin", source, out, "--recipe", recipe, "--read-bytes", nbytes]
        words += ["--shard-bytes", shard_bytes]
        command = [sys.executable, "-P", __file__, *map(str, words)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--terabytes", type=float, nargs="+", default=[0.25, 1.0])
    parser.add_argument("--recipe", default="int4-hqq")
    parser.add_argument("--read-bytes", type=int, default=2 * 10**9)
    parser.add_argument("--shard-bytes", type=int, default=1 << 30)
    parser.add_argument("--folder", type=Path, help="where the sparse files are made")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--begin", type=Path, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.begin is not None:
        begun = plan_and_begin(*options.begin, options.recipe, options.read_bytes, options.shard_bytes)
        print(json.dumps(begun))
        return
    rows = [
        measured(each, options.recipe, options.read_bytes, options.shard_bytes, options.folder)
        for each in options.terabytes
    ]
    write_json(options.out, {"recipe": options.recipe, "rows": rows})
    print("     TB  tensors  shards  plan s  peak GB, planning  peak GB, with the first shards")
    for row in rows:
        print(
            f"{row['source_bytes'] / 1e12:>7.3f} {row['tensors']:>8} {row['shards']:>7}"
            f" {row['plan_seconds']:>7.1f} {row['planning_peak_bytes'] / 1e9:>18.2f}"
            f" {row['peak_bytes'] / 1e9:>22.2f}"
        )
    holds = all(row["plan_seconds"] <= MOST_SECONDS and row["peak_bytes"] <= MOST_BYTES for row in rows)
    sys.exit(not holds)


if __name__ == "__main__":
    main()
