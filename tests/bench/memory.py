"""Peak memory of a whole quantize of a synthetic sharded checkpoint: the process's own ru_maxrss.

    python -P tests/bench/memory.py --gigabytes 4 --out tests/bench/results/memory.json

The checkpoint (Qwen3 architecture, random bf16 weights, shards of about 1 GB) lies in a temporary folder.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

HIDDEN, INTERMEDIATE, VOCABULARY, HEAD_DIM = 4096, 12288, 151936, 128
SHARD_BYTES = 1 << 30
CHILD = "import sys; from scalegate.pipeline.cli.main import main; main(sys.argv[1:])"


def make_checkpoint(folder: Path, nbytes: int) -> int:
    """Write a checkpoint of at least `nbytes`; returns its size."""
    shapes = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), "model.norm.weight": (HIDDEN,)}
    layers = 0
    while sum(_size(shape) for shape in shapes.values()) < nbytes:
        shapes |= _layer(layers)
        layers += 1
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    groups: list[dict[str, tuple[int, ...]]] = [{}]
    for name, shape in shapes.items():
        if groups[-1] and sum(map(_size, groups[-1].values())) + _size(shape) > SHARD_BYTES:
            groups.append({})
        groups[-1][name] = shape
    weight_map = {}
    for index, group in enumerate(groups, start=1):
        shard = f"model-{index:05d}-of-{len(groups):05d}.safetensors"
        tensors = {
            name: torch.empty(shape, dtype=torch.bfloat16).normal_(std=0.02) for name, shape in group.items()
        }
        save_file(tensors, folder / shard, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(group, shard)
    total = sum(map(_size, shapes.values()))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def _layer(index: int) -> dict[str, tuple[int, ...]]:
    prefix = f"model.layers.{index}"
    return {
        f"{prefix}.self_attn.q_proj.weight": (32 * HEAD_DIM, HIDDEN),
        f"{prefix}.self_attn.k_proj.weight": (8 * HEAD_DIM, HIDDEN),
        f"{prefix}.self_attn.v_proj.weight": (8 * HEAD_DIM, HIDDEN),
        f"{prefix}.self_attn.o_proj.weight": (HIDDEN, 32 * HEAD_DIM),
        f"{prefix}.self_attn.q_norm.weight": (HEAD_DIM,),
        f"{prefix}.self_attn.k_norm.weight": (HEAD_DIM,),
        f"{prefix}.mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN),
        f"{prefix}.mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
        f"{prefix}.mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
        f"{prefix}.input_layernorm.weight": (HIDDEN,),
        f"{prefix}.post_attention_layernorm.weight": (HIDDEN,),
    }


def _size(shape: tuple[int, ...]) -> int:
    return 2 * torch.Size(shape).numel()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=4)
    parser.add_argument("--folder", type=Path, help="where the temporary folder is made")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as temporary:
        source, artifact = Path(temporary) / "source", Path(temporary) / "artifact"
        source.mkdir()
        maker = [sys.executable, "-P", __file__, "--make", str(source), str(int(arguments.gigabytes * 1e9))]
        subprocess.run(maker, check=True)
        total = sum(path.stat().st_size for path in source.iterdir())
        start = time.perf_counter()
        # A child's peak includes that of the process it was forked from, so this one stays small: no weights.
        command = [sys.executable, "-P", "-c", CHILD, "quantize", str(source), "--out", str(artifact)]
        child = subprocess.Popen(command)
        _, status, usage = os.wait4(child.pid, 0)
        if status:
            raise SystemExit(f"quantize failed with status {status}")
        seconds = time.perf_counter() - start
        written = sum(path.stat().st_size for path in artifact.iterdir())
    result = {
        "source_bytes": total,
        "artifact_bytes": written,
        "peak_rss_bytes": usage.ru_maxrss * 1024,
        "seconds": seconds,
        "torch": torch.__version__,
    }
    print(
        f"{total / 1e9:.2f} GB to {written / 1e9:.2f} GB in {seconds:.0f} s, "
        f"peak RSS {result['peak_rss_bytes'] / 1e9:.2f} GB"
    )
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--make"]:
        make_checkpoint(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        main()
