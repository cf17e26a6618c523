"""Hybrids in the engine: INT4 and bf16 beside vLLM's bf16; shapes of Qwen3-Next and Nemotron-H, 8 layers.

    python -P tests/bench/engine/hybrids.py --out OUT/hybrids.json --vllm

Weights are random. All engines are up at once and take turns in every cell; vLLM is in a process of its own
(`hybrids_vllm.py`), which starts while ours warm up. How many different last tokens a wave draws is shown, as
experts are taken by chance. Exit status 1 where anything was compiled once all were warm.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from scalegate.base.atomic_files import write_json
from scalegate.layouts.modules.experts import is_experts
from scalegate.serving_check.engine.engine import Engine
from scalegate.serving_check.engine.options import EngineOptions
from scalegate.tests.bench.engine.int4_engine import merged, quantized
from scalegate.tests.bench.engine.moe import with_int4_experts
from scalegate.tests.bench.engine.serving import greedy, timed
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3_next": {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "num_hidden_layers": 8,
        "layer_types": [*["linear_attention"] * 3, "full_attention"] * 2,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "max_position_embeddings": 4096,
    },
    "nemotron_h": {
        "vocab_size": 131072,
        "hidden_size": 4096,
        "intermediate_size": 21504,
        "num_hidden_layers": 8,
        "layers_block_type": ["mamba", "mlp", "mamba", "mlp", "mamba", "attention", "mamba", "mlp"],
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
        "n_groups": 8,
        "max_position_embeddings": 4096,
    },
}
"""Qwen3-Next-80B-A3B and Nemotron-H-8B."""
LAYOUT = "swap_ab"
LEAST_ROWS = 64
"""Of a quantized product; gates with one row stay in bf16."""
CELLS = ((32, 512), (2048, 128))
NS = (1, 16, 64, 128)
VLLM_BAR, INT4_BAR, INT4_BAR_UP_TO = 1.0, 1.2, 32
MAX_LEN, MOST = 2304, 128


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--n", type=int, nargs="+", default=list(NS))
    parser.add_argument("--vllm", action="store_true", help="measure vLLM too")
    parser.add_argument("--vllm-share", type=float, default=0.42, help="of the GPU's memory, for vLLM")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    results: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "models": {},
    }
    for name in options.models:
        results["models"][name] = measure(name, options)
        write_json(options.out, results)
        torch.cuda.empty_cache()
    for name, found in results["models"].items():
        show(name, found["rows"])
    compiled = [event for found in results["models"].values() for event in found["compiled_after_warm_up"]]
    if compiled:
        sys.exit(f"COMPILED AFTER WARM-UP: {compiled}")


def config_of(name: str) -> PretrainedConfig:
    return AutoConfig.for_model(name, **SHAPES[name])


def random_model(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(config_of(name), dtype=torch.bfloat16).eval()


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    int4 = quantized(merged(random_model(name)), LAYOUT, least_rows=LEAST_ROWS)
    if any(map(is_experts, int4.modules())):
        int4 = with_int4_experts(int4)
    torch.cuda.empty_cache()
    models = {"bf16": merged(random_model(name)), "int4": int4}
    with tempfile.TemporaryDirectory() as scratch:
        theirs = Vllm(name, Path(scratch), options.vllm_share) if options.vllm else None
        engines = {kind: warm_engine(kind, model) for kind, model in models.items()}
        if theirs is not None and not theirs.is_ready():
            print(f"{name}: vLLM ended with exit status {theirs.process.wait()}", flush=True)
            theirs = None
        for engine in engines.values():
            engine.jit_monitor.arm()
        rows = []
        for input_len, output_len in CELLS:
            for n in options.n:
                rows.append(row(engines, theirs, n, input_len, output_len))
                print(name, rows[-1], flush=True)
                write_json(options.out.with_suffix(f".{name}.json"), rows)
        if theirs is not None:
            theirs.stop()
    compiled = [str(event) for engine in engines.values() for event in engine.stats().compilations]
    return {"rows": rows, "compiled_after_warm_up": compiled}


def warm_engine(kind: str, model: PreTrainedModel) -> Engine:
    started = time.perf_counter()
    options = EngineOptions(
        max_num_seqs=MOST, max_model_len=MAX_LEN, kv_cache_tokens=MOST * (MAX_LEN - 64), prefill_chunk=8192
    )
    engine = Engine(model, options, frozenset())
    engine.warm_up(progress=False)
    engine.jit_monitor.disarm()  # Until the other engines are warm too.
    torch.cuda.synchronize()
    print(f"{kind}: constructed and warmed up in {time.perf_counter() - started:.1f} s", flush=True)
    return engine


def row(
    engines: dict[str, Engine], theirs: "Vllm | None", n: int, input_len: int, output_len: int
) -> dict[str, Any]:
    found: dict[str, Any] = {"input_len": input_len, "output_len": output_len, "n": n}
    for kind, engine in engines.items():
        found[kind], found[f"{kind}_different_tokens"] = wave(engine, n, input_len, output_len)
    if theirs is not None:
        answer = theirs.ask(n, input_len, output_len)
        found["vllm"], found["vllm_different_tokens"] = answer["tok_s"], answer["different_tokens"]
    return found


def wave(engine: Engine, n: int, input_len: int, output_len: int) -> tuple[float, int]:
    """Output tokens a second, and how many different last tokens there are."""
    asked = random_prompts(n, input_len)
    engine.generate(asked, greedy(4))
    answers: list[Any] = []
    seconds = timed(lambda: answers.extend(engine.generate(asked, greedy(output_len))))
    if [len(answer.token_ids) for answer in answers] != [output_len] * n:
        raise RuntimeError("tokens are missing")
    return n * output_len / seconds, len({answer.token_ids[-1] for answer in answers})


def random_prompts(n: int, length: int) -> list[list[int]]:
    """The same for the same n and length."""
    generator = torch.Generator().manual_seed(n)
    return torch.randint(0, 130000, (n, length), generator=generator).tolist()


class Vllm:
    """vLLM's unquantized model in a process of its own."""

    def __init__(self, name: str, folder: Path, share: float):
        written = config_of(name).to_dict() | {"architectures": [type_of(name)], "dtype": "bfloat16"}
        (folder / "config.json").write_text(json.dumps(written), encoding="utf-8")
        script = Path(__file__).with_name("hybrids_vllm.py")
        words = [sys.executable, "-P", str(script), str(folder), str(MAX_LEN), str(MOST), str(share)]
        self.process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"VLLM_LOGGING_STREAM": "ext://sys.stderr"},
        )

    def is_ready(self) -> bool:
        """Wait until it is ready; False if it has ended instead."""
        return self._line() == {"ready": True}

    def ask(self, n: int, input_len: int, output_len: int) -> dict[str, Any]:
        request = {"prompts": random_prompts(n, input_len), "output_len": output_len}
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        answer = self._line()
        if answer is None:
            raise RuntimeError(f"vLLM ended with exit status {self.process.wait()}")
        return answer

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()

    def _line(self) -> dict[str, Any] | None:
        assert self.process.stdout is not None
        return next((json.loads(line) for line in self.process.stdout if line.startswith("{")), None)


def type_of(name: str) -> str:
    return AutoModelForCausalLM._model_mapping[type(config_of(name))].__name__


def show(name: str, rows: list[dict[str, Any]]) -> None:
    print(
        f"\n{name}: output tokens a second\n{'load':>9} {'N':>4} {'bf16':>7} {'INT4':>7} {'over bf16':>9}",
        end="",
    )
    print(f" {'vLLM bf16':>9} {'bf16 over vLLM':>14}   different tokens")
    for row in rows:
        load = f"{row['input_len']}/{row['output_len']}"
        ratio, vllm = row["int4"] / row["bf16"], row.get("vllm")
        theirs = f"{vllm:>9.0f} {row['bf16'] / vllm:>14.3f}" if vllm else " " * 24
        different = [row.get(f"{kind}_different_tokens") for kind in ("bf16", "int4", "vllm")]
        speeds = f"{row['bf16']:>7.0f} {row['int4']:>7.0f} {ratio:>9.3f}"
        print(f"{load:>9} {row['n']:>4} {speeds} {theirs}   {different}")
    print(f"bars: bf16 over vLLM {VLLM_BAR}, INT4 over bf16 {INT4_BAR} at N <= {INT4_BAR_UP_TO}")


if __name__ == "__main__":
    main()
