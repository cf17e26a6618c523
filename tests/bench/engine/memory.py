"""Peak memory of a quantize of a synthetic sharded checkpoint: all of the process's own resident pages.

    python -P tests/bench/engine/memory.py --gigabytes 4 --out OUT/memory.json
    python -P tests/bench/engine/memory.py --gigabytes 4 --recipe int4-gptq --calibration TEXT \
        --layers 3 --out ...

The checkpoint (Qwen3 architecture, random bf16 weights, shards of about 1 GB) lies in a temporary folder. It
has the layers of an 8B model; where a text is read those of a 2B one, whose whole is 4 GB. All layers are
alike, so `--layers` ends such a job once so many are calibrated.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

VOCABULARY, HEAD_DIM, KV_HEADS = 151936, 128, 8
TOKENIZER = Path(__file__).resolve().parents[3] / "examples" / "qwen3-pycode-5m"
SHARD_BYTES = 1 << 30
POLL_SECONDS = 0.5
CHILD = "import sys; from scalegate.pipeline.cli.main import main; main(sys.argv[1:])"


@dataclass(frozen=True)
class Sizes:
    hidden: int
    intermediate: int
    heads: int


SIZES = {"8b": Sizes(4096, 12288, 32), "2b": Sizes(2048, 6144, 16)}


def make_checkpoint(folder: Path, nbytes: int, sizes: Sizes) -> int:
    """Write a checkpoint of at least `nbytes`; returns its size."""
    shapes = {"model.embed_tokens.weight": (VOCABULARY, sizes.hidden), "model.norm.weight": (sizes.hidden,)}
    layers = 0
    while sum(_size(shape) for shape in shapes.values()) < nbytes:
        shapes |= _layer(layers, sizes)
        layers += 1
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": KV_HEADS,
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


def _layer(index: int, sizes: Sizes) -> dict[str, tuple[int, ...]]:
    prefix, hidden, intermediate = f"model.layers.{index}", sizes.hidden, sizes.intermediate
    return {
        f"{prefix}.self_attn.q_proj.weight": (sizes.heads * HEAD_DIM, hidden),
        f"{prefix}.self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, hidden),
        f"{prefix}.self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, hidden),
        f"{prefix}.self_attn.o_proj.weight": (hidden, sizes.heads * HEAD_DIM),
        f"{prefix}.self_attn.q_norm.weight": (HEAD_DIM,),
        f"{prefix}.self_attn.k_norm.weight": (HEAD_DIM,),
        f"{prefix}.mlp.gate_proj.weight": (intermediate, hidden),
        f"{prefix}.mlp.up_proj.weight": (intermediate, hidden),
        f"{prefix}.mlp.down_proj.weight": (hidden, intermediate),
        f"{prefix}.input_layernorm.weight": (hidden,),
        f"{prefix}.post_attention_layernorm.weight": (hidden,),
    }


def _size(shape: tuple[int, ...]) -> int:
    return 2 * torch.Size(shape).numel()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=4)
    parser.add_argument("--folder", type=Path, help="where the temporary folder is made")
    parser.add_argument("--recipe", default="int4-hqq")
    parser.add_argument("--calibration", type=Path, help="a text, for recipes that read one")
    parser.add_argument("--layers", type=int, help="calibrated ones after which the job is ended")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    reads = arguments.calibration is not None
    with tempfile.TemporaryDirectory(dir=arguments.folder) as temporary:
        source, artifact = Path(temporary) / "source", Path(temporary) / "artifact"
        source.mkdir()
        size = [str(int(arguments.gigabytes * 1e9)), "2b" if reads else "8b"]
        subprocess.run([sys.executable, "-P", __file__, "--make", str(source), *size], check=True)
        for file in TOKENIZER.glob("tokenizer*") if reads else ():
            shutil.copy(file, source)
        total = sum(path.stat().st_size for path in source.iterdir())
        start = time.perf_counter()
        # A child's peak includes that of the process it was forked from, so this one stays small: no weights.
        command = [sys.executable, "-P", "-c", CHILD, "quantize", str(source), "--out", str(artifact)]
        command += ["--recipe", arguments.recipe]
        command += ["--calibration", str(arguments.calibration)] if reads else []
        child = subprocess.Popen(command)
        layers = 0
        while (ended := os.wait4(child.pid, os.WNOHANG))[0] == 0:
            layers = len(list(artifact.glob(".scalegate-calibration/layer-*.safetensors")))
            if arguments.layers and layers >= arguments.layers:
                child.kill()
                ended = os.wait4(child.pid, 0)
                break
            time.sleep(POLL_SECONDS)
        _, status, usage = ended
        stopped = bool(arguments.layers) and layers >= arguments.layers
        if status and not stopped:
            raise SystemExit(f"quantize failed with status {status}")
        seconds = time.perf_counter() - start
        written = sum(path.stat().st_size for path in artifact.iterdir() if path.is_file())
    result = {
        "recipe": arguments.recipe,
        "source_bytes": total,
        "artifact_bytes": None if stopped else written,
        "layers_calibrated": layers if reads else None,
        "peak_rss_bytes": usage.ru_maxrss * 1024,
        "seconds": seconds,
        "torch": torch.__version__,
    }
    print(
        f"{arguments.recipe}: {total / 1e9:.2f} GB read, {layers} layers calibrated, {seconds:.0f} s, "
        f"peak RSS {result['peak_rss_bytes'] / 1e9:.2f} GB"
    )
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--make"]:
        make_checkpoint(Path(sys.argv[2]), int(sys.argv[3]), SIZES[sys.argv[4]])
    else:
        main()
