"""Layers with a state on one GPU: greedy tokens in bf16 and INT4, and a soak of requests with preemptions.

    python -P tests/bench/engine/states_gpu.py --out OUT/states.json

A small model with random weights stands for each kind of state. Its bf16 tokens are compared with those of
`generate()` by `greedy.py`; those of its INT4 artifact with what the dequantized weights in float32 would
have chosen, where tokens may differ by what `generate()` in bf16 errs. The soak is `soak.py` in float32: no
request may be lost, nothing compiled, and answers must be those to each request alone. Kinds run at the same
time. Exit status 1 where something misses.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from scalegate import LLM, SamplingParams, quantize
from scalegate.base.atomic_files import write_json
from scalegate.tests.bench.engine.families import architecture, dequantized
from scalegate.tests.bench.engine.greedy import NEAR_TIE
from transformers import AutoConfig, AutoModelForCausalLM

HERE = Path(__file__).parent
EXAMPLE = HERE.parents[2] / "examples" / "qwen3-pycode-5m"
DEVICE = "cuda"
RECIPE = "int4-symmetric"
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 2}
KINDS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    },
    "bamba": MAMBA | {"attn_layer_indices": [2]},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "jamba": {
        "attn_layer_period": 4,
        "attn_layer_offset": 2,
        "num_experts": 1,
        "use_mamba_kernels": False,
        "mamba_dt_rank": 64,
        "mamba_d_state": 16,
    },
}
"""Gated delta rule, Mamba 2, short convolution and Mamba 1. Without experts, which make chaos of bf16 where
weights are random."""
PROMPTS, TOKENS = 16, 32
SOAK = ["--requests", "2000", "--rate", "300", "--max-prompt", "500", "--min-output", "100"]
SOAK += ["--max-output", "300", "--alone", "200", "--max-num-seqs", "64", "--kv-cache-tokens", "8192"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--soaked", nargs="*", choices=KINDS, default=["qwen3_5_text", "bamba"])
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    results: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "kinds": {},
    }
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(8) as threads:
        folders = {kind: made(kind, Path(scratch) / kind) for kind in options.kinds}
        tasks = {
            (kind, part): threads.submit(outcome, part, folder)
            for part in options.parts
            for kind, folder in folders.items()
            if part != "soak" or kind in options.soaked
        }
        for (kind, part), task in tasks.items():
            results["kinds"].setdefault(kind, {})[part] = task.result()
            write_json(options.out, results)
    rows = [(kind, part, found) for kind, parts in results["kinds"].items() for part, found in parts.items()]
    for kind, part, found in rows:
        print(f"{kind:<12} {part:<7} {'ok  ' if found['good'] else 'MISS'} {found['summary']}")
    sys.exit(not all(found["good"] for _, _, found in rows))


def made(kind: str, folder: Path) -> Path:
    """A random model of this kind in bf16, with the bundled model's tokenizer."""
    torch.manual_seed(3)
    vocab_size = json.loads((EXAMPLE / "config.json").read_text())["vocab_size"]
    config = AutoConfig.for_model(kind, **SIZES | KINDS[kind], vocab_size=vocab_size)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2 and "A_log" not in name and "conv1d" not in name:
                parameter.normal_(0.0, 1.3 / parameter.shape[-1] ** 0.5)
    model.save_pretrained(folder)
    for file in EXAMPLE.glob("*token*.json"):
        shutil.copy(file, folder)
    return folder


def outcome(part: str, folder: Path) -> dict[str, Any]:
    try:
        return PARTS[part](folder)
    except Exception as error:
        return {"good": False, "summary": f"{type(error).__name__}: {str(error)[:600]}"}


def bf16(folder: Path) -> dict[str, Any]:
    answer = folder.with_suffix(".greedy.json")
    command = [HERE / "greedy.py", folder, "--prompts", PROMPTS, "--tokens", TOKENS, "--out", answer]
    ran(command)
    found = json.loads(answer.read_text())
    gaps = [parting["gap_relative"] for parting in found["partings"]]
    far = sum(gap >= NEAR_TIE for gap in gaps)
    return {
        "good": far == 0 and not found["compilations"],
        "summary": f"{len(gaps)} of {PROMPTS} part from generate(), {far} not at a near tie; "
        f"compiled after warm-up: {len(found['compilations'])}",
        "partings": found["partings"],
        "partings_of_generate_batched": found["partings_of_generate_batched"],
    }


def int4(folder: Path) -> dict[str, Any]:
    """In a process of its own: see `main_of_int4`."""
    answer = folder.with_suffix(".int4.json")
    ran([__file__, "--int4", folder, answer])
    return json.loads(answer.read_text())


def main_of_int4(folder: Path, answer: Path) -> None:
    artifact = folder.with_suffix(".int4")
    quantize(folder, RECIPE, artifact, progress=False)
    plain = dequantized(folder, artifact, folder.with_suffix(".plain"))
    assert plain is not None
    generator = torch.Generator().manual_seed(5)
    prompts = [
        torch.randint(5, 7900, (1 + 11 * row,), generator=generator).tolist() for row in range(PROMPTS)
    ]
    greedy = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    with LLM(artifact, device=DEVICE, dtype="bfloat16", max_model_len=1024, progress=False) as llm:
        answers = [list(result.token_ids) for result in llm.generate(prompts, greedy)]
    import transformers

    model_class = getattr(transformers, architecture(plain))
    exact, rounded = (
        model_class.from_pretrained(plain, dtype=dtype).to(DEVICE).eval()
        for dtype in (torch.float32, torch.bfloat16)
    )
    shares = [
        furthest(exact, rounded, prompt, tokens) for prompt, tokens in zip(prompts, answers, strict=True)
    ]
    far = sum(share > 1 for share in shares)
    summary = (
        f"{far} of {PROMPTS} answers have a token that bf16 does not explain; furthest {max(shares):.2f}"
    )
    write_json(answer, {"good": far == 0, "summary": summary, "shares": shares})


@torch.inference_mode()
def furthest(exact: Any, rounded: Any, prompt: Sequence[int], tokens: Sequence[int]) -> float:
    """How far below the likeliest token the chosen ones are at most, as a share of what bf16 can turn.

    Where `generate()` in bf16 errs by e in some logit, two tokens may be 2e apart.
    """
    ids = torch.tensor([[*prompt, *tokens]], device=DEVICE)
    logits, other = (model(ids).logits[0, len(prompt) - 1 : -1].float() for model in (exact, rounded))
    chosen = logits.gather(1, torch.tensor(tokens, device=DEVICE)[:, None])[:, 0]
    turned = 2 * (logits - other).abs().amax(1)
    return float(((logits.amax(1) - chosen) / turned).max())


def soak(folder: Path) -> dict[str, Any]:
    answer = folder.with_suffix(".soak.json")
    ran([HERE / "soak.py", folder, "--device", DEVICE, *SOAK, "--out", answer], may_fail=True)
    found = json.loads(answer.read_text())
    names = ("preemptions", "errors", "lost_tokens", "compilations", "sent_again_alone")
    summary = ", ".join(f"{name} {found[name]}" for name in names)
    return {
        **found,
        "good": found["passed"],
        "summary": f"{summary}, differing {len(found['differing_alone'])}",
    }


def ran(command: Sequence[Any], may_fail: bool = False) -> None:
    process = subprocess.run([sys.executable, "-P", *map(str, command)], capture_output=True, text=True)
    if process.returncode and not may_fail:
        raise RuntimeError(process.stderr.strip().splitlines()[-1] or process.stdout[-1500:])


PARTS = {"bf16": bf16, "int4": int4, "soak": soak}

if __name__ == "__main__":
    if sys.argv[1:2] == ["--int4"]:
        main_of_int4(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        main()
