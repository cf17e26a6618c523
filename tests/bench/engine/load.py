"""Loading and packing an INT4 checkpoint of Qwen3-8B's shape: seconds from the page cache, peak GPU memory.

    python -P tests/bench/engine/load.py --out OUT/load.json

The checkpoint (compressed-tensors, groups of 128, integer zeros) is made of random codes and scales, in a
temporary folder. It is loaded in a process of its own, which has imported everything before the clock starts.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from scalegate.base.atomic_files import write_json

HEAD_DIM, GROUP = 128, 128
WEIGHTS = {
    "num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": False,
    "dynamic": False,
}  # fmt: skip
CHILD = """
import json, sys, time, torch
from scalegate.pipeline.model_loader.load_model import load_model
folder, device, layout = sys.argv[1:]
on_gpu = device != "cpu"
if on_gpu:
    torch.zeros(1, device=device)
    torch.cuda.reset_peak_memory_stats()
started = time.perf_counter()
model = load_model(folder, device=device, dtype=torch.bfloat16, layout=layout or None, progress=False).model
if on_gpu:
    torch.cuda.synchronize()
seconds = time.perf_counter() - started
held = {t.data_ptr(): t.numel() * t.element_size() for t in [*model.parameters(), *model.buffers()]}
told = {"seconds": seconds, "model_bytes": sum(held.values())}
if on_gpu:
    told["peak_bytes"] = torch.cuda.max_memory_allocated()
    told["peak_reserved_bytes"] = torch.cuda.max_memory_reserved()
print(json.dumps(told))
"""


def linear(name: str, n: int, k: int, device: str) -> dict[str, torch.Tensor]:
    """A random weight as compressed-tensors stores it."""
    words = torch.randint(-(2**31), 2**31, (n, k // 8), dtype=torch.int32, device=device)
    zeros = torch.randint(-(2**31), 2**31, (n // 8, k // GROUP), dtype=torch.int32, device=device)
    scale = (torch.rand(n, k // GROUP, device=device) + 0.5).mul_(0.003).to(torch.bfloat16)
    shape = torch.tensor([n, k])
    tensors = {"packed": words, "zero_point": zeros, "scale": scale, "shape": shape}
    return {f"{name}.weight_{part}": tensor.cpu() for part, tensor in tensors.items()}


def make_checkpoint(folder: Path, hidden: int, layers: int, vocabulary: int, device: str) -> int:
    """Write it, a shard a layer; returns its bytes."""
    heads, intermediate = hidden // HEAD_DIM, 3 * hidden
    narrow = max(1, heads // 4) * HEAD_DIM
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "dtype": "bfloat16",
        "hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": narrow // HEAD_DIM, "head_dim": HEAD_DIM,
        "vocab_size": vocabulary, "tie_word_embeddings": False,
        "quantization_config": {
            "quant_method": "compressed-tensors", "format": "pack-quantized",
            "quantization_status": "compressed", "ignore": ["lm_head"], "kv_cache_scheme": None,
            "config_groups": {"group_0": {
                "targets": ["Linear"], "weights": WEIGHTS, "input_activations": None,
                "output_activations": None, "format": "pack-quantized",
            }},
        },
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    weight_map: dict[str, str] = {}

    def write(shard: str, tensors: dict[str, torch.Tensor]) -> int:
        save_file(tensors, folder / shard, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, shard))
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device).mul_(0.02).to(torch.bfloat16).cpu()

    ends = {f"{name}.weight": random(vocabulary, hidden) for name in ("model.embed_tokens", "lm_head")}
    total = write("ends.safetensors", ends | {"model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16)})
    for index in range(layers):
        prefix = f"model.layers.{index}"
        tensors: dict[str, torch.Tensor] = {}
        for name, width in (
            ("input_layernorm", hidden), ("post_attention_layernorm", hidden),
            ("self_attn.q_norm", HEAD_DIM), ("self_attn.k_norm", HEAD_DIM),
        ):  # fmt: skip
            tensors[f"{prefix}.{name}.weight"] = torch.ones(width, dtype=torch.bfloat16)
        for name, n, k in (
            ("self_attn.q_proj", heads * HEAD_DIM, hidden), ("self_attn.k_proj", narrow, hidden),
            ("self_attn.v_proj", narrow, hidden), ("self_attn.o_proj", hidden, heads * HEAD_DIM),
            ("mlp.gate_proj", intermediate, hidden), ("mlp.up_proj", intermediate, hidden),
            ("mlp.down_proj", hidden, intermediate),
        ):  # fmt: skip
            tensors |= linear(f"{prefix}.{name}", n, k, device)
        total += write(f"layer-{index:03d}.safetensors", tensors)
    index_file = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index_file), encoding="utf-8")
    return total


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layout", default="swap_ab", help="empty: what the loader takes by itself")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where the temporary folder is made")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    runs = []
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        folder = Path(temporary)
        written = make_checkpoint(folder, options.hidden, options.layers, options.vocabulary, options.device)
        command = [sys.executable, "-P", "-c", CHILD, temporary, options.device, options.layout]
        for _ in range(options.runs):
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            runs.append(json.loads(done.stdout.splitlines()[-1]))
            run = runs[-1]
            print(f"{run['seconds']:.1f} s, {run['model_bytes'] / 1e9:.2f} GB held", flush=True)
            for name in ("peak_bytes", "peak_reserved_bytes"):
                if name in run:
                    print(f"    {name} {run[name] / run['model_bytes']:.3f} times that", flush=True)
    if options.out:
        name = torch.cuda.get_device_name() if options.device != "cpu" else "cpu"
        record = {"device": name, "torch": torch.__version__, "layout": options.layout}
        write_json(options.out, record | {"checkpoint_bytes": written, "runs": runs})


if __name__ == "__main__":
    main()
