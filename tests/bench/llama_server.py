"""Serves a Qwen3 checkpoint by llama.cpp, for comparison; runs in an environment with `xllamacpp` and `gguf`.

    PYTHON tests/bench/llama_server.py CHECKPOINT --numbers q4_0 --folder FOLDER --threads 1 --slots 32

Writes the weights to a GGUF file first: linear layers and the embedding as `--numbers` says, norms in
float32. Then prints `Serving FILE on URL`, and serves until it is ended. Only for prompts of token ids: the
tokenizer is written down so that the server starts, not so that it splits texts as the checkpoint does.
"""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import xllamacpp

NUMBERS = {
    "bf16": gguf.GGMLQuantizationType.BF16,
    "f16": gguf.GGMLQuantizationType.F16,
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
    "q4_0": gguf.GGMLQuantizationType.Q4_0,
}
CONTEXT = 512
"""Tokens of a slot."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--numbers", choices=NUMBERS, default="q4_0")
    parser.add_argument("--folder", type=Path, required=True, help="for the GGUF file")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--slots", type=int, default=32, help="requests at once")
    options = parser.parse_args()
    path = options.folder / f"{options.checkpoint.name}-{options.numbers}.gguf"
    write(options.checkpoint, path, options.numbers)
    server = xllamacpp.Server(parameters(path, options.threads, options.slots))
    print(f"Serving {path.name} on {server.listening_address}", flush=True)
    while True:
        time.sleep(60)


def parameters(path: Path, threads: int, slots: int) -> Any:
    """No cache of prompts, which would flatter repeats."""
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.n_parallel, params.n_ctx = slots, slots * CONTEXT
    params.n_gpu_layers = 0
    params.cache_prompt, params.cache_ram_mib = False, 0
    params.cont_batching, params.warmup = True, True
    params.port = 0
    params.reuse_port = False
    return params


def write(checkpoint: Path, path: Path, numbers: str) -> None:
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    if config["model_type"] != "qwen3":
        raise SystemExit(f"{checkpoint} is a {config['model_type']}; this script writes Qwen3 only")
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    add_tokenizer(writer, checkpoint)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config["num_hidden_layers"])
    for name, values in tensors(checkpoint):
        kind = NUMBERS[numbers] if values.ndim > 1 else gguf.GGMLQuantizationType.F32
        written = names.get_name(name, try_suffixes=(".weight",))
        if written is None:
            raise SystemExit(f"{checkpoint}: llama.cpp's Qwen3 has no {name}")
        writer.add_tensor(written, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tokenizer(writer: Any, checkpoint: Path) -> None:
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text(encoding="utf-8"))
    special = {token["id"] for token in tokenizer["added_tokens"]}
    words = {**tokenizer["model"]["vocab"], **{t["content"]: t["id"] for t in tokenizer["added_tokens"]}}
    tokens = sorted(words, key=words.__getitem__)
    kinds = [gguf.TokenType.CONTROL if words[token] in special else gguf.TokenType.NORMAL for token in tokens]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_eos_token_id(min(special))
    writer.add_add_bos_token(False)


def tensors(checkpoint: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Every tensor in float32. numpy has no bfloat16: its bits are the upper half of a float32's."""
    for path in sorted(checkpoint.glob("*.safetensors")):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            begin = file.tell()
            for name, entry in header.items():
                if name == "__metadata__":
                    continue
                if entry["dtype"] != "BF16":
                    raise SystemExit(f"{path}: {name} is {entry['dtype']}; this script reads BF16 only")
                first, last = entry["data_offsets"]
                file.seek(begin + first)
                bits = np.frombuffer(file.read(last - first), np.uint16).astype(np.uint32) << 16
                yield name, bits.view(np.float32).reshape(entry["shape"])


if __name__ == "__main__":
    main()
