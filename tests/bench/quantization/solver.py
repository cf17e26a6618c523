"""Solver speed: a 4096×4096 bf16 weight on the CPU (INT4 beside torchao), or a Qwen3-8B's worth on a GPU.

    OMP_NUM_THREADS=2 python -P tests/bench/quantization/solver.py --out OUT/solver_cpu.json
    python -P tests/bench/quantization/solver.py --device cuda --out OUT/solver_h200.json
    python -P tests/bench/quantization/solver.py --format nvfp4 --out OUT/solver_nvfp4_cpu.json

Random weights (speed does not depend on them), made on the device, disk excluded. On a GPU each distinct
shape is solved as often as the model has it; the codes are copied to the host, as writing them needs.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from scalegate.layouts.formats.int4 import Int4
from scalegate.layouts.formats.nvfp4 import NVFP4
from scalegate.pipeline.quantization.quantizers.int4_least_squares import quantize_int4
from scalegate.pipeline.quantization.quantizers.nvfp4_least_squares import quantize_nvfp4, shared_global_scale
from scalegate.pipeline.quantization.quantizers.quantizer import QuantizedWeight

SPEC = Int4(128)
QWEN3_8B = {
    "q, o": (4096, 4096, 2),
    "k, v": (1024, 4096, 2),
    "gate, up": (12288, 4096, 2),
    "down": (4096, 12288, 1),
}
LAYERS = 36


def int4(weight: torch.Tensor) -> QuantizedWeight:
    return quantize_int4(weight, SPEC)


def nvfp4(weight: torch.Tensor) -> QuantizedWeight:
    """With the pass that finds the largest magnitude."""
    shared = shared_global_scale(float(weight.abs().amax()))
    return quantize_nvfp4(weight, NVFP4(), shared.to(weight.device))


SOLVERS: dict[str, Callable[[torch.Tensor], QuantizedWeight]] = {"int4": int4, "nvfp4": nvfp4}


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def torchao_seconds(weight: torch.Tensor) -> float:
    from torchao.quantization.quant_primitives import _choose_qparams_and_quantize_affine_hqq

    def theirs() -> object:
        return _choose_qparams_and_quantize_affine_hqq(
            weight, nbits=4, group_size=SPEC.group_size, compute_dtype=torch.bfloat16, device="cpu"
        )

    return seconds(theirs)


def on_cpu(name: str, repeats: int) -> dict:
    solve = SOLVERS[name]
    torch.manual_seed(0)
    weight = torch.randn(4096, 4096).to(torch.bfloat16)
    solve(weight[:64])
    mine = [seconds(lambda: solve(weight)) for _ in range(repeats)]
    theirs = torchao_seconds(weight) if name == "int4" else None
    mine += [seconds(lambda: solve(weight)) for _ in range(repeats)]
    median = statistics.median(mine)
    result = {"threads": torch.get_num_threads(), "scalegate_seconds": mine}
    if theirs is None:
        print(f"scalegate {median:.2f} s")
        return result
    print(f"scalegate {median:.2f} s, torchao {theirs:.2f} s: {theirs / median:.1f} times faster")
    return result | {"torchao_seconds": theirs, "ratio": theirs / median}


def on_gpu(name: str, device: torch.device) -> dict:
    solve = SOLVERS[name]
    weights = {
        name: torch.randn(n, k, device=device, dtype=torch.float32).mul_(0.02).to(torch.bfloat16)
        for name, (n, k, _) in QWEN3_8B.items()
    }
    for weight in weights.values():
        solve(weight).weight.to("cpu")
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    total, count, elements = 0.0, 0, 0
    for kind, (n, k, per_layer) in QWEN3_8B.items():
        times = []
        for _ in range(per_layer * LAYERS):
            times.append(seconds(lambda kind=kind: solve(weights[kind]).weight.to("cpu")))
        torch.cuda.synchronize(device)
        total += sum(times)
        count += len(times)
        elements += n * k * len(times)
        print(f"{kind:10} {n}x{k}: {statistics.median(times) * 1000:.1f} ms each, {len(times)} of them")
    peak = torch.cuda.max_memory_allocated(device) / 2**30
    small = weights["k, v"][:256]
    same = same_bits(solve, small)
    print(
        f"{count} linears, {elements / 1e9:.2f}e9 weights: {total:.1f} s, "
        f"peak {peak:.1f} GiB; bits as on CPU: {same}"
    )
    return {
        "gpu": torch.cuda.get_device_name(device),
        "linears": count,
        "weights": elements,
        "seconds": total,
        "peak_gib": peak,
        "bits_equal_cpu": same,
    }


def same_bits(solve: Callable[[torch.Tensor], QuantizedWeight], weight: torch.Tensor) -> bool:
    gpu, cpu = solve(weight).weight.to("cpu").tensors(), solve(weight.cpu()).weight.tensors()
    return all(torch.equal(gpu[name].float(), cpu[name].float()) for name in gpu)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--format", choices=SOLVERS, default="int4")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    on_device = device.type != "cpu"
    name = arguments.format
    result = on_gpu(name, device) if on_device else on_cpu(name, arguments.repeats)
    result |= {"group_size": SPEC.group_size} if name == "int4" else {"format": name}
    result |= {"torch": torch.__version__}
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
