"""The portable packed products as on an older GPU beside vLLM's Marlin, humming and gemlite, on a Hopper GPU.

    python -P tests/bench/kernels/older_gpu_peers.py --out PEERS.json --marlin VLLM/_C_stable_libtorch.abi3.so
    python -P tests/bench/kernels/older_gpu_peers.py --out HUMMING.json --peers humming --formats int4

Ours, humming and gemlite are code for 8.0, which is translated for the GPU that is there. vLLM ships Marlin
for float16 as PTX for 8.0, which is translated too, and Marlin for bfloat16 as machine code for 9.0 from the
same source; ours is compared with the faster of the two. INT4 is symmetric, which is Marlin's fastest form.

Weights are rotated past the L2 cache, calls run in CUDA graphs, figures are medians of interleaved samples,
and every answer is compared with float64. First comes the rate of mma.sync alone, which bounds what code for
8.0 can reach with many rows. "plain bf16" is a product of unpacked bf16 weights as 8.0, in its fastest tile.
"""

import argparse
import itertools
import json
import math
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from scalegate.layouts.choosing.timing import TimingBudget, interleaved_microseconds
from scalegate.layouts.formats.int4 import Int4, Int4Weight
from scalegate.layouts.formats.nvfp4 import NVFP4, NVFP4Weight
from scalegate.layouts.formats.weight_format import Weight, WeightFormat
from scalegate.layouts.packing.all_layouts import LAYOUTS
from scalegate.layouts.packing.layout import Problem
from scalegate.tests.bench.kernels import older_gpu_gemlite, older_gpu_humming, older_gpu_plain
from scalegate.tests.bench.kernels.linear import MODELS, exact_weight, geometric_mean
from scalegate.tests.bench.kernels.older_gpu import pretend
from torch import Tensor
from torch.nn import functional
from triton import jit
from triton import language as tl

CAPABILITY = (8, 0)
MODEL = "qwen3-8b"
ROTATED_BYTES = 300e6
CALLS = 40
"""In a graph."""
MAX_ERROR = {"ours": 4e-3, "others": 1e-2}
FORMATS: dict[str, tuple[WeightFormat, str, tuple[torch.dtype, ...]]] = {
    "int4": (Int4(128, symmetric=True), "int4_portable", (torch.bfloat16, torch.float16)),
    "nvfp4": (NVFP4(), "nvfp4_portable", (torch.bfloat16,)),
}
"""Each format's spec, our layout, and the dtypes that it serves."""
SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16"}
MARLIN, HUMMING, GEMLITE = "marlin", "humming", "gemlite"
PEERS = (MARLIN, HUMMING, GEMLITE)
DTYPES_OF = {GEMLITE: (torch.float16,)}
"""gemlite tunes for minutes, and adds splits of K faster in float16. Other peers run in both dtypes."""
BASELINE = "cublas bf16"
Call = Callable[[int], Tensor]

UINT4_MINUS_8 = 1 << 50 | 8 << 17 | 4 << 8
E2M1 = 1 << 49 | 1 << 16 | 1 << 8 | 2
"""vLLM's numbers of scalar types: exponent bits, mantissa bits, sign, bias, finite, what stands for NaN."""
LOCKS_PER_SM = 4
BF16_ONES = 0x3F803F80


@dataclass(frozen=True)
class MarlinWeight:
    """A weight as vLLM's Marlin takes it, for activations of one dtype."""

    words: Tensor
    scales: Tensor
    global_scale: Tensor | None
    scalar_type: int
    locks: Tensor
    n: int
    k: int

    @classmethod
    def pack(cls, weight: Weight, dtype: torch.dtype) -> "MarlinWeight":
        n, k = weight.shape
        assert isinstance(weight, Int4Weight | NVFP4Weight)
        words = weight.codes.contiguous().view(torch.int32).t().contiguous()  # eight k a word, the lowest low
        device = words.device
        no_order = torch.empty(0, dtype=torch.int32, device=device)
        packed = torch.ops._C.gptq_marlin_repack(words, no_order, k, n, 4, False)
        scales = in_marlins_order(weight.scale.t().to(dtype))
        global_scale, scalar_type = None, UINT4_MINUS_8
        if isinstance(weight, NVFP4Weight):
            scales, factor = without_sign(scales, dtype)
            exponent = 14 if dtype == torch.float16 else 126
            global_scale = (weight.global_scale.float() * 2.0 ** (exponent - 7) / factor).reshape(1)
            scalar_type = E2M1
        count = LOCKS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count
        locks = torch.zeros(count, dtype=torch.int32, device=device)
        return cls(packed, scales, global_scale, scalar_type, locks, n, k)

    @property
    def nbytes(self) -> int:
        return self.words.nbytes + self.scales.nbytes

    def copy(self) -> "MarlinWeight":
        parts = self.words.clone(), self.scales.clone(), self.global_scale, self.scalar_type
        return MarlinWeight(*parts, self.locks.clone(), self.n, self.k)

    def matmul(self, x: Tensor) -> Tensor:
        return torch.ops._C.marlin_gemm(
            x, None, self.words, None, self.scales, None, self.global_scale, None, None, None, self.locks,
            self.scalar_type, x.shape[0], self.n, self.k, True, False, True, False,
        )  # fmt: skip


def in_marlins_order(scales: Tensor) -> Tensor:
    """[K/g, N]: of every 64 columns, column 8 j + i becomes column 8 i + j."""
    groups, n = scales.shape
    return scales.reshape(groups, n // 64, 8, 8).transpose(2, 3).reshape(groups, n).contiguous()


def without_sign(scales: Tensor, dtype: torch.dtype) -> tuple[Tensor, float]:
    """Scales of NVFP4 as Marlin reads them: five bits of exponent, three of mantissa, no sign; and a factor.

    The factor is a power of two by which scales for bfloat16 are multiplied, so that none becomes zero.
    """
    groups, n = scales.shape
    halves = scales.half().reshape(groups, n // 4, 4)[..., [0, 2, 1, 3]].reshape(groups, n)
    factor = 1.0
    if dtype == torch.bfloat16:
        factor = max(1.0, 2.0 ** math.floor(math.log2(448 / float(halves.max()))))
    halves = halves * (factor * 128)
    halves[halves < 2] = 0
    high_bytes = (halves.view(torch.int16) << 1).view(torch.uint8)[:, 1::2]
    return high_bytes.contiguous().view(torch.float8_e4m3fn), factor


def rotated(packed: Any, copy: Callable[[], Any]) -> list[Any]:
    return [packed] + [copy() for _ in range(max(2, int(ROTATED_BYTES // packed.nbytes)) - 1)]


class Layer:
    """One weight as every contestant packs it, and as cuBLAS takes it."""

    def __init__(self, form: str, n: int, k: int, peers: list[str]):
        self.spec, self.own, dtypes = FORMATS[form]
        self.n, self.k = n, k
        self.weight = self.spec.random(n, k, torch.device("cuda"))
        count = max(2, int(ROTATED_BYTES // (2 * n * k)))
        self.dense = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
        self.multiply: dict[str, tuple[torch.dtype, Callable[[Tensor, int], Tensor]]] = {}
        self.errors: dict[int, dict[str, float]] = {}
        self.plain = older_gpu_plain.PlainProduct(self.dense)
        of_peers = [(peer, dtype) for peer in peers for dtype in DTYPES_OF.get(peer, tuple(SHORT))]
        for name, dtype in [(self.own, dtype) for dtype in dtypes] + of_peers:
            try:
                self._add(name, dtype)
            except Exception as error:
                print(f"{n}x{k}: {name} in {SHORT[dtype]} left out: {str(error)[:300]}", flush=True)

    def _add(self, name: str, dtype: torch.dtype) -> None:
        if name == MARLIN:
            packed = MarlinWeight.pack(self.weight, dtype)
            copies = rotated(packed, packed.copy)
            multiply: Callable[[Tensor, int], Tensor] = lambda x, i: copies[i % len(copies)].matmul(x)  # noqa: E731
        else:
            layout: Any = LAYOUTS[name]
            problem = Problem(self.spec, self.n, self.k, dtype, torch.device("cuda"))
            refusal = layout.refuses(problem)
            if refusal is not None:
                raise ValueError(f"refuses: {refusal}")
            copies = rotated(layout.pack(self.weight, dtype), lambda: layout.pack(self.weight, dtype))
            multiply = lambda x, i: layout.matmul(x, copies[i % len(copies)])  # noqa: E731
        self.multiply[f"{name} {SHORT[dtype]}"] = dtype, multiply

    def check(self, ms: list[int]) -> None:
        """Compare every contestant's answer with float64. Whoever fails or is wrong is not timed."""
        exact = exact_weight(self.weight)
        for m in ms:
            x = torch.randn(m, self.k, device="cuda", dtype=torch.bfloat16)
            expected = x.double() @ exact.T
            for name, (dtype, multiply) in self.multiply.items():
                try:
                    answer = multiply(x.to(dtype), 0).double()
                    error = float((answer - expected).norm() / expected.norm())
                except Exception as failure:
                    print(f"{self.n}x{self.k} M={m}: {name} left out: {str(failure)[:300]}", flush=True)
                    error = math.inf
                self.errors.setdefault(m, {})[name] = error
                if not error <= MAX_ERROR["ours" if name.startswith(self.own) else "others"]:
                    print(f"{self.n}x{self.k} M={m}: {name} WRONG, error {error:.1e}", flush=True)

    def measure(self, ms: list[int]) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        for turn, m in enumerate([ms[0], *ms]):  # the first figures on a cold chip are thrown away
            x = torch.randn(m, self.k, device="cuda", dtype=torch.bfloat16)
            calls: dict[str, Call] = {BASELINE: partial(self._by_cublas, x)}
            plain = self.plain.fastest(x, CALLS, MAX_ERROR["ours"])
            if plain is not None:
                calls[older_gpu_plain.NAME] = plain
            for name, (dtype, multiply) in self.multiply.items():
                if self.errors[m][name] <= MAX_ERROR["ours" if name.startswith(self.own) else "others"]:
                    calls[name] = partial(multiply, x.to(dtype))
            budget = TimingBudget(samples=12, seconds=0.4)
            times = interleaved_microseconds(calls, CALLS, x.device, budget)
            if turn:
                rows.append({"m": m, "microseconds": times, "errors": self.errors[m]})
                figures = "  ".join(f"{name} {us:.1f}" for name, us in times.items())
                print(f"{self.n}x{self.k} M={m}: {figures}", flush=True)
        return rows

    def _by_cublas(self, x: Tensor, i: int) -> Tensor:
        return functional.linear(x, self.dense[i % len(self.dense)])


def tables(layers: list[list[dict[str, Any]]], own: str, peers: list[str]) -> list[str]:
    """Geometric means over the layers: each over cuBLAS in bf16, and our best over each peer's best."""
    ms = [row["m"] for row in layers[0]]
    names = list(dict.fromkeys(name for rows in layers for row in rows for name in row["microseconds"]))
    lines = [f"{'speed, cuBLAS in bf16 = 1':<34}" + "".join(f"{f'M={m}':>8}" for m in ms)]

    def cells(ratio_of: Callable[[dict[str, float]], float | None]) -> str:
        text = ""
        for at in range(len(ms)):
            ratios = [ratio_of(rows[at]["microseconds"]) for rows in layers]
            known = [ratio for ratio in ratios if ratio is not None]
            text += f"{geometric_mean(known):8.2f}" if len(known) == len(layers) else f"{'-':>8}"
        return text

    def best(times: dict[str, float], start: str) -> float | None:
        return min((us for name, us in times.items() if name.startswith(start)), default=None)

    def over(times: dict[str, float], peer: str) -> float | None:
        theirs, ours = best(times, peer), best(times, own)
        return theirs / ours if theirs and ours else None

    for name in names:
        lines.append(f"{name:<34}" + cells(lambda t, name=name: t[BASELINE] / t[name] if name in t else None))
    for peer in [*peers, older_gpu_plain.NAME]:
        lines.append(f"{f'our best over best {peer}':<34}" + cells(lambda t, peer=peer: over(t, peer)))
    return lines


def compile_one(job: tuple[str, str, torch.dtype, str, int, Path]) -> None:
    """In a process of its own, so that compiled code is on disk for the one that measures."""
    form, name, dtype, shape, m, of_humming = job
    pretend(*CAPABILITY)
    n, k = MODELS[MODEL][shape]
    layout: Any = None if name == older_gpu_plain.NAME else LAYOUTS[name]
    began = time.monotonic()
    try:
        if name == older_gpu_plain.NAME:
            older_gpu_plain.PlainProduct([torch.zeros(n, k, device="cuda", dtype=dtype)]).compile(m)
            return
        if name == HUMMING:
            older_gpu_humming.pretend(of_humming)
        if name == GEMLITE:
            older_gpu_gemlite.pretend()
        packed = layout.pack(FORMATS[form][0].random(n, k, torch.device("cuda")), dtype)
        layout.matmul(torch.zeros(m, k, device="cuda", dtype=dtype), packed)
        torch.cuda.synchronize()
        if name in PEERS:
            print(f"{name} {SHORT[dtype]} {shape} M={m}: {time.monotonic() - began:.0f} s", flush=True)
    except Exception as error:  # which the process that measures meets again
        print(f"{form} {name} {SHORT[dtype]} {shape} M={m}: {str(error)[:200]}", flush=True)


def compile_all(forms: list[str], ms: list[int], peers: list[str], of_humming: Path | None) -> None:
    """Ours for shapes with splits of K and without: its code depends on nothing else of them."""
    jobs = [
        (forms[0], older_gpu_plain.NAME, torch.bfloat16, shape, m, of_humming)
        for shape, m in itertools.product(("qkv", "gate_up"), ms)
    ]
    jobs += [
        (form, name, dtype, shape, m, of_humming)
        for form in forms
        for name, dtypes, shapes in [
            (FORMATS[form][1], FORMATS[form][2], ("qkv", "gate_up")),
            *(
                (peer, DTYPES_OF.get(peer, tuple(SHORT)), tuple(MODELS[MODEL]))
                for peer in peers
                if peer != MARLIN
            ),
        ]
        for dtype, shape, m in itertools.product(dtypes, shapes, reversed(ms))
    ]
    spawn = multiprocessing.get_context("spawn")
    with spawn.Pool(len(os.sched_getaffinity(0))) as pool:
        pool.map(compile_one, jobs, chunksize=1)


@jit
def mma_sync_kernel(out, ones, steps, SIZE: tl.constexpr):
    """In each warp, SIZE / threads chains of matrix instructions whose operands stay in registers."""
    index = tl.arange(0, SIZE)
    pair = index * 0 + ones
    s0 = tl.zeros([SIZE], tl.float32)
    s1, s2, s3 = s0, s0, s0
    for _ in range(steps):
        s0, s1, s2, s3 = tl.inline_asm_elementwise(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
            "{$0, $1, $2, $3}, {$8, $8, $8, $8}, {$8, $8}, {$4, $5, $6, $7};",
            "=f,=f,=f,=f,f,f,f,f,r", [s0, s1, s2, s3, pair],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
    tl.store(out + index, s0 + s1 + s2 + s3)


def mma_sync_rate() -> float:
    """FLOP a second of mma.sync with its operands in registers, on all of the GPU."""
    device, warps, chains, steps = torch.device("cuda"), 8, 8, 8192
    ctas = 2 * torch.cuda.get_device_properties(device).multi_processor_count
    out = torch.empty(32 * warps * chains, dtype=torch.float32, device=device)
    flops = 2 * 16 * 8 * 16 * warps * chains * steps * ctas
    best = 0.0
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        mma_sync_kernel[(ctas,)](out, BF16_ONES, steps, 32 * warps * chains, num_warps=warps)
        end.record()
        end.synchronize()
        best = max(best, flops / (begin.elapsed_time(end) * 1e-3))
    if not torch.all(out == 4.0 * 16 * steps):  # a row of ones times a column of them is 16
        raise RuntimeError("mma.sync alone: the sums are wrong")
    return best


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--marlin", type=Path, help="vLLM's extension, _C_stable_libtorch.abi3.so")
    parser.add_argument("--peers", default=",".join(PEERS), help="comma-separated")
    parser.add_argument("--formats", default=",".join(FORMATS), help="comma-separated")
    parser.add_argument("--m", default="1,8,16,32,64,128,256", help="comma-separated")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    began = time.monotonic()
    pretend(*CAPABILITY)  # before anything compiles
    ms, peers = [int(m) for m in options.m.split(",")], options.peers.split(",")
    of_humming = Path(tempfile.mkdtemp(prefix="humming-as-8.0-")) if HUMMING in peers else None
    if of_humming:
        older_gpu_humming.pretend(of_humming)
    if GEMLITE in peers:
        older_gpu_gemlite.pretend()
    if MARLIN in peers:
        torch.ops.load_library(options.marlin)
    result: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    result["mma_sync_flops"] = mma_sync_rate()
    print(f"mma.sync alone: {result['mma_sync_flops'] / 1e12:.0f} TFLOP/s", flush=True)
    forms, shapes = options.formats.split(","), MODELS[MODEL]
    compile_all(forms, ms, peers, of_humming)
    print(f"compiled after {time.monotonic() - began:.0f} s", flush=True)
    layers = {
        (form, shape): Layer(form, *shapes[shape], peers) for form, shape in itertools.product(forms, shapes)
    }
    for layer in layers.values():
        layer.check(ms)
    print(f"answers checked: {len(layers)} layers; what runs beside this disturbs from here on", flush=True)
    for form, of_form in itertools.groupby(layers, key=lambda key: key[0]):
        result[form] = {}
        for key in of_form:
            result[form][key[1]] = layers[key].measure(ms)
            options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        title = f"{form} as {CAPABILITY[0]}.{CAPABILITY[1]}"
        print(
            "", title, *tables(list(result[form].values()), FORMATS[form][1], peers), "", sep="\n", flush=True
        )


if __name__ == "__main__":
    main()
