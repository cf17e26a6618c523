"""Times our product and vLLM's own in vLLM's linear layers, and writes the plugin's table of who is faster.

    python -P tests/bench/vllm_plugin/linear.py --out OUT --check
    python -P tests/bench/vllm_plugin/linear.py --out OUT --table vllm_plugin/measured.json

For an environment with vLLM and the wheel `scalegate-kernels`. Both products run in CUDA graphs, interleaved,
with random numbers, on weights that the L2 cache does not hold. vLLM's is the kernel that it would choose.
Before anything is timed the two answers are compared. `--check` does only that, in every convention, and says
how far each answer is from a product in float64 of the weights that the format stands for.
"""

import argparse
import json
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from scalegate.layouts.choosing.timing import TimingBudget, interleaved_microseconds
from scalegate.tests.bench.vllm_plugin.checkpoints import CONVENTIONS, dequantized
from scalegate.tests.bench.vllm_plugin.layers import Layer, layer_of, vllm_alone

MS = (1, 8, 16, 32, 64, 128, 256, 512, 2048, 8192)
SHAPES = [
    (6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (28672, 4096), (4096, 14336),
    (6144, 2560), (2560, 4096), (19456, 2560), (2560, 9728),
    (10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672),
    (5120, 8192), (8192, 4096), (28672, 8192), (8192, 14336),
    (3072, 4096), (4096, 2048), (12288, 4096), (4096, 6144),
    (2560, 8192), (8192, 2048), (14336, 8192), (8192, 7168),
    (7168, 5120), (51200, 5120), (5120, 25600), (25600, 5120), (5120, 12800),
    (3072, 2048), (2048, 2048), (12288, 2048), (2048, 6144), (2048, 8192),
]  # fmt: skip
"""[N, K] of merged layers: Qwen3 1.7B to 32B, Llama 8B and 70B; whole, and of ranks of two and four."""
FEW = 14
"""How many of these, Qwen3-8B and 4B and a 70B among them, are measured in the less common kinds."""
KINDS = [
    ("int4-sym", "bfloat16", len(SHAPES)), ("int4-zp", "bfloat16", len(SHAPES)),
    ("nvfp4", "bfloat16", len(SHAPES)), ("int4-sym", "float16", FEW), ("int8", "bfloat16", FEW),
    ("int4-g32", "bfloat16", FEW), ("int4-zp", "float16", FEW),
]  # fmt: skip
KEYS = {
    "int4-sym": "int4 g128 sym", "int4-zp": "int4 g128 zp", "int4-g32": "int4 g32 sym", "int8": "int8 g128",
    "gptq": "int4 g128 sym", "awq": "int4 g128 zp", "nvfp4": "nvfp4",
}  # fmt: skip
"""What our formats call them."""
DECODERS = ("int4-sym", "int4-g32", "int8", "nvfp4")
"""One convention of each for which the kernel is compiled anew."""
ROTATED_BYTES = 100e6
"""Of weights that are used in turn: twice the L2 cache."""
MOST_DIFFERENCE = 1e-2
"""Relative. Either product rounds weights, what zero points add to them, and y to bf16: three times 2^-9, and
twice that for two products, if all errors agreed."""
BUDGET = TimingBudget(samples=9, seconds=0.1, warmup_calls=2)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--table", type=Path, help="where the plugin's table is written")
    parser.add_argument("--seconds", type=float, default=400)
    parser.add_argument("--compile", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.compile:
        with vllm_alone(max(MS)):
            compile_forms(*options.compile)
        return
    compile_ahead([(convention, dtype) for convention in DECODERS for dtype in ("bfloat16", "float16")])
    with vllm_alone(max(MS)):
        if options.check:
            check()
        else:
            measure_all(options)


def compile_ahead(kinds: list[tuple[str, str]]) -> None:
    """All forms of all kinds, a process each: on one core they would take minutes."""
    started = time.monotonic()
    me = [sys.executable, "-P", *sys.argv, "--compile"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    waiting = [subprocess.Popen([*me, *kind], **quiet) for kind in kinds]
    ended = [process.wait() for process in waiting]
    print(f"compiled {len(kinds)} kinds in {time.monotonic() - started:.0f} s: {ended}", flush=True)


def compile_forms(convention: str, dtype: str) -> None:
    """Layers whose products together take every form of the kernel."""
    for n, k in ((4096, 4096), (2560, 9728), (24576, 4096), (4096, 12288), (57344, 8192)):
        made = CONVENTIONS[convention].tensors(n, k)
        kind = getattr(torch, dtype)
        layer_of(convention, made, n, k, kind, ours=True, bias=None)(torch.zeros(1, k, dtype=kind).cuda())
        del made
        torch.cuda.empty_cache()


@torch.no_grad()
def check() -> None:
    """Both answers in every convention and type, with a bias, in one row and in many."""
    for convention in CONVENTIONS:
        for dtype in (torch.bfloat16, torch.float16):
            for n, k in ((4096, 4096), (1536, 2560)):
                made = CONVENTIONS[convention].tensors(n, k)
                bias = torch.randn(n, device="cuda", dtype=dtype)
                layers = {ours: layer_of(convention, made, n, k, dtype, ours, bias) for ours in (False, True)}
                found = [difference(layers, torch.randn(m, k, device="cuda").to(dtype)) for m in (1, 37, 700)]
                words = f"{layers[False].kernel} and {layers[True].kernel}"
                print(
                    f"{convention} {dtype} {n}x{k}: {words} differ by {', '.join(f'{d:.1e}' for d in found)}"
                )
                if "weight_packed" in made and convention != "int8":
                    weight = dequantized(made, torch.float64)
                    print(f"  from float64: {from_float64(layers, weight, bias)}")
                if max(found) > MOST_DIFFERENCE:
                    raise SystemExit("the answers differ")


def from_float64(layers: dict[bool, Layer], weight: torch.Tensor, bias: torch.Tensor) -> str:
    """How far both sides are from the exact product in one row and in many, relative, and what rounding the
    exact product to their type costs.
    """
    told = []
    for m in (1, 37, 700):
        x = torch.randn(m, weight.shape[1], device="cuda").to(bias.dtype)
        exact = x.double() @ weight.T + bias.double()
        answers = [layers[False](x), layers[True](x), exact.to(bias.dtype)]
        errors = [float((each.double() - exact).norm() / exact.norm()) for each in answers]
        told.append("M={} vLLM {:.1e}, ours {:.1e}, rounding {:.1e}".format(m, *errors))
    return "; ".join(told)


def difference(layers: dict[bool, Layer], x: torch.Tensor) -> float:
    theirs, ours = (layers[which](x).double() for which in (False, True))
    return float((ours - theirs).norm() / theirs.norm())


def measure_all(options: argparse.Namespace) -> None:
    """Every kind and shape that there is time for, the common ones first; then the table."""
    started = time.monotonic()
    rows: list[dict[str, Any]] = []
    for convention, dtype, count in KINDS:
        for n, k in SHAPES[:count]:
            if time.monotonic() - started > options.seconds:
                print(f"no time for {convention} {dtype} {n}x{k} and what follows", flush=True)
                break
            row = measured(convention, dtype, n, k)
            rows.append(row)
            ratios = " ".join(f"{t / o:.2f}" for o, t in zip(row["ours_us"], row["vllm_us"], strict=True))
            print(f"{convention} {dtype} {n}x{k} {row['vllm_kernel']}: {ratios}", flush=True)
        write(options, rows)
    print(f"{len(rows)} shapes in {time.monotonic() - started:.0f} s; M = {MS}", flush=True)


def write(options: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    import triton
    import vllm

    properties = torch.cuda.get_device_properties(0)
    versions = {"vllm": vllm.__version__, "torch": torch.__version__, "triton": triton.__version__}
    measurement = {
        "gpu": properties.name, "capability": [properties.major, properties.minor],
        "sms": properties.multi_processor_count, "versions": versions, "rows": rows,
    }  # fmt: skip
    lines = [json.dumps(row) for row in rows]
    head = json.dumps({**measurement, "rows": []}).removesuffix("[]}")
    text = '{"measurements": [' + head + "[\n" + ",\n".join(lines) + "\n]}]}\n"
    json.loads(text)
    for path in filter(None, (options.out / "measured.json", options.table)):
        path.write_text(text, encoding="utf-8")


@torch.no_grad()
def measured(convention: str, dtype: str, n: int, k: int) -> dict[str, Any]:
    """One row of the table."""
    kind = getattr(torch, dtype)
    made = CONVENTIONS[convention].tensors(n, k)
    nbytes = sum(tensor.nbytes for tensor in made.values())
    copies = max(1, math.ceil(ROTATED_BYTES / nbytes))
    layers = {
        ours: [layer_of(convention, made, n, k, kind, ours, None) for _ in range(copies)]
        for ours in (True, False)
    }
    ours_us, vllm_us = [], []
    for m in MS:
        x = torch.randn(m, k, device="cuda").to(kind)
        apart = difference({which: each[0] for which, each in layers.items()}, x)
        if not apart < MOST_DIFFERENCE:
            raise SystemExit(f"{convention} {n}x{k} at M={m}: the answers differ by {apart:.1e}")
        calls = {str(which): (lambda i, x=x, each=each: each[i](x)) for which, each in layers.items()}
        microseconds = interleaved_microseconds(calls, copies, torch.device("cuda"), BUDGET)
        ours_us.append(round(microseconds["True"], 2))
        vllm_us.append(round(microseconds["False"], 2))
    kernel = layers[False][0].kernel
    del layers, made
    torch.cuda.empty_cache()
    return {
        "format": KEYS[convention], "dtype": dtype, "n": n, "k": k, "m": list(MS), "ours_us": ours_us,
        "vllm_us": vllm_us, "vllm_kernel": kernel,
    }  # fmt: skip


if __name__ == "__main__":
    main()
