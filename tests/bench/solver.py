"""Solver speed: one 4096×4096 bf16 weight beside torchao's HQQ on the CPU, or a Qwen3-8B's worth on a GPU.

    OMP_NUM_THREADS=2 python -P tests/bench/solver.py --out tests/bench/results/solver_cpu.json
    python -P tests/bench/solver.py --device cuda --out tests/bench/results/solver_h200.json

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
from scalegate.pipeline.quantization.int4_least_squares import quantize_int4

SPEC = Int4(128)
QWEN3_8B = {
    "q, o": (4096, 4096, 2),
    "k, v": (1024, 4096, 2),
    "gate, up": (12288, 4096, 2),
    "down": (4096, 12288, 1),
}
LAYERS = 36


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def on_cpu(repeats: int) -> dict:
    from torchao.quantization.quant_primitives import _choose_qparams_and_quantize_affine_hqq

    torch.manual_seed(0)
    weight = torch.randn(4096, 4096).to(torch.bfloat16)

    def theirs() -> object:
        return _choose_qparams_and_quantize_affine_hqq(
            weight, nbits=4, group_size=SPEC.group_size, compute_dtype=torch.bfloat16, device="cpu"
        )

    quantize_int4(weight[:64], SPEC)
    mine = [seconds(lambda: quantize_int4(weight, SPEC)) for _ in range(repeats)]
    torchao_time = seconds(theirs)
    mine += [seconds(lambda: quantize_int4(weight, SPEC)) for _ in range(repeats)]
    median = statistics.median(mine)
    print(f"scalegate {median:.2f} s, torchao {torchao_time:.2f} s: {torchao_time / median:.1f} times faster")
    return {
        "threads": torch.get_num_threads(),
        "scalegate_seconds": mine,
        "torchao_seconds": torchao_time,
        "ratio": torchao_time / median,
    }


def on_gpu(device: torch.device) -> dict:
    weights = {
        name: torch.randn(n, k, device=device, dtype=torch.float32).mul_(0.02).to(torch.bfloat16)
        for name, (n, k, _) in QWEN3_8B.items()
    }
    for weight in weights.values():
        quantize_int4(weight, SPEC).weight.to("cpu")
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    total, count, elements = 0.0, 0, 0
    for name, (n, k, per_layer) in QWEN3_8B.items():
        times = []
        for _ in range(per_layer * LAYERS):
            times.append(seconds(lambda name=name: quantize_int4(weights[name], SPEC).weight.to("cpu")))
        torch.cuda.synchronize(device)
        total += sum(times)
        count += len(times)
        elements += n * k * len(times)
        print(f"{name:10} {n}x{k}: {statistics.median(times) * 1000:.1f} ms each, {len(times)} of them")
    peak = torch.cuda.max_memory_allocated(device) / 2**30
    small = weights["k, v"][:256]
    same = same_bits(small)
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


def same_bits(weight: torch.Tensor) -> bool:
    gpu, cpu = (
        quantize_int4(weight, SPEC).weight.to("cpu"),
        quantize_int4(weight.cpu(), SPEC).weight,
    )
    return all(
        torch.equal(getattr(gpu, part), getattr(cpu, part)) for part in ("codes", "scale", "zero_point")
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    result = on_cpu(arguments.repeats) if device.type == "cpu" else on_gpu(device)
    result |= {"group_size": SPEC.group_size, "torch": torch.__version__}
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
