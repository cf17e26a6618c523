"""Products by quantized weights on this CPU beside bf16 ones, at M from 1 to 512, and the copy bandwidth.

    python -P tests/bench/layouts/coded_cpu.py [--format int4] [--threads 2 1] [--seconds 1] [--only 29M]
        [--sample-ms 0.3]

Shapes are those of the 5M and 29M example models, merged as they are served, and 4096x4096. The calls are a
model's: as many copies of a weight as make up the model, so that bf16 weights of the 29M do not fit into a
last cache of 32 MB and those of four bits do. All are interleaved, and the time is the smallest of many
samples, each the mean over calls of a third of a millisecond: a neighbour on a busy machine disturbs longer
ones too often. On a quiet one, a sample of 4096x4096 should be all calls of its model, 3 ms: before a single
call, the other contestants have emptied the cache and the second thread sleeps. bf16 is torch's `F.linear`,
and oneDNN's product with a weight in its own blocks. Writes FORMAT_cpu.json and FORMAT_cpu.md in
results/layouts. Not for choosing layouts, which `layouts_cpu.py` shows.
"""

import argparse
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from scalegate.base.atomic_files import write_json
from scalegate.base.installed import kernel_versions
from scalegate.layouts.choosing.plan import device_name
from scalegate.layouts.choosing.timing import Call
from scalegate.layouts.formats.int4 import Int4
from scalegate.layouts.formats.int8 import Int8
from scalegate.layouts.formats.iq2_xxs import IQ2XXS
from scalegate.layouts.formats.nvfp4 import NVFP4
from scalegate.layouts.formats.weight_format import WeightFormat
from scalegate.layouts.packing.all_layouts import LAYOUTS
from scalegate.layouts.packing.cpu_tiles import CPU_AMX, CPU_TILES
from scalegate.layouts.packing.layout import Layout, PackedWeight, Problem
from torch import Tensor
from torch.nn import functional

CPU = torch.device("cpu")
RESULTS = Path(__file__).parents[1] / "results" / "layouts"
MS = (1, 2, 4, 8, 16, 32, 128, 512)
FORMATS: dict[str, WeightFormat] = {"int4": Int4(), "nvfp4": NVFP4(), "iq2-xxs": IQ2XXS(), "int8": Int8()}
LAYOUTS_OF_FORMATS = ("cpu_int4", *(layout.name for layout in (*CPU_TILES, *CPU_AMX)))
BF16 = ("bf16 F.linear", "bf16 oneDNN blocks")
COPY_BYTES = 64 << 20
LEAST_TURNS = 20
NOISE = """
Where a product takes milliseconds and its neighbours microseconds, other processes held one of its threads in
every sample: such a figure says nothing about the kernel. One thread is disturbed less than two."""


@dataclass(frozen=True)
class Product:
    """copies: as many as a model has layers, or more than any cache holds"""

    name: str
    n: int
    k: int
    copies: int


PRODUCTS = (
    Product("5M q+k+v", 512, 256, 16),
    Product("5M gate+up", 1536, 256, 8),
    Product("5M down", 256, 768, 16),
    Product("29M q+k+v", 1536, 512, 32),
    Product("29M o", 512, 1024, 48),
    Product("29M gate+up", 3584, 512, 14),
    Product("29M down", 512, 1792, 28),
    Product("4096x4096", 4096, 4096, 8),
)


def copy_bandwidth() -> float:
    """Bytes read and written a second by torch's copy of a buffer that no cache holds."""
    source, target = (torch.zeros(COPY_BYTES, dtype=torch.uint8) for _ in range(2))
    seconds = []
    for _ in range(100):
        start = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - start)
    return 2 * COPY_BYTES / min(seconds)


def repeated(weights: list[Tensor], product: Callable[[Tensor, Tensor], object], x: Tensor) -> Call:
    return lambda copy: product(x, weights[copy])


def of_layout(layout: Layout, packed: list[PackedWeight], x: Tensor) -> Call:
    return lambda copy: layout.matmul(x, packed[copy])


def onednn(x: Tensor, weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise.default(x, weight, None, "none", [], "")


def cloned(packed: PackedWeight) -> PackedWeight:
    return replace(packed, tensors={name: tensor.clone() for name, tensor in packed.tensors.items()})


class Contestant:
    """A call on copy after copy, for `seconds` at a time."""

    def __init__(self, call: Call, copies: int, seconds: float):
        self.call, self.copies, self.at, self.calls = call, copies, 0, 1
        once = min(self.sample() for _ in range(max(10, copies)))
        self.calls = max(1, min(copies, round(seconds / once)))

    def sample(self) -> float:
        """Seconds of a call."""
        start = time.perf_counter()
        for _ in range(self.calls):
            self.call(self.at)
            self.at = (self.at + 1) % self.copies
        return (time.perf_counter() - start) / self.calls


def smallest_microseconds(
    calls: Mapping[str, Call], copies: int, seconds: float, of_sample: float
) -> dict[str, float]:
    contestants = {name: Contestant(call, copies, of_sample) for name, call in calls.items()}
    best = dict.fromkeys(contestants, float("inf"))
    deadline, turns = time.monotonic() + seconds, 0
    while turns < LEAST_TURNS or time.monotonic() < deadline:
        for name, contestant in contestants.items():
            best[name] = min(best[name], contestant.sample())
        turns += 1
    return {name: 1e6 * value for name, value in best.items()}


def measure(
    product: Product, spec: WeightFormat, seconds: float, of_sample: float
) -> dict[str, dict[str, float]]:
    """Microseconds by contestant and M."""
    problem = Problem(spec, product.n, product.k, torch.bfloat16, CPU)
    weight = problem.spec.random(product.n, product.k, CPU)
    dense = [weight.dequantize(torch.bfloat16) for _ in range(product.copies)]
    blocks = [torch.ops.mkldnn._reorder_linear_weight(weight, None) for weight in dense]
    layouts = {
        name: [cloned(LAYOUTS[name].pack(weight, torch.bfloat16)) for _ in range(product.copies)]
        for name in LAYOUTS_OF_FORMATS
        if LAYOUTS[name].refuses(problem) is None
    }
    times: dict[str, dict[str, float]] = {}
    for m in MS:
        x = torch.randn(m, product.k).bfloat16()
        calls = {
            BF16[0]: repeated(dense, functional.linear, x),
            BF16[1]: repeated(blocks, onednn, x),
        } | {name: of_layout(LAYOUTS[name], packed, x) for name, packed in layouts.items()}
        with torch.inference_mode():
            found = smallest_microseconds(calls, product.copies, seconds, of_sample)
        for name, microseconds in found.items():
            times.setdefault(name, {})[str(m)] = round(microseconds, 2)
    return times


def lines(rows: list[dict], bandwidth: Mapping[int, float]) -> list[str]:
    """The table in Markdown: microseconds of both bf16, and how many times faster each layout is."""
    text = [f"Copy bandwidth: {', '.join(f'{n} threads {b / 1e9:.1f} GB/s' for n, b in bandwidth.items())}."]
    text += ["", "| shape | threads | | " + " | ".join(f"M={m}" for m in MS) + " |"]
    text += ["|---|---|---|" + "---|" * len(MS)]
    for row in rows:
        times, head = row["microseconds"], f"| {row['product']} | {row['threads']} |"
        best = {str(m): min(times[name][str(m)] for name in BF16) for m in MS}
        for name in BF16:
            text.append(f"{head} {name}, µs | " + " | ".join(f"{times[name][str(m)]:.1f}" for m in MS) + " |")
        for name in times:
            if name not in BF16:
                ratios = [f"{best[str(m)] / times[name][str(m)]:.2f}×" for m in MS]
                text.append(f"{head} {name} over the better | " + " | ".join(ratios) + " |")
        if row["shape"] == [4096, 4096]:
            for name in times:
                if name not in BF16:
                    share = row["bytes"][name] / (times[name]["1"] / 1e6) / bandwidth[row["threads"]]
                    text.append(f"{head} {name}, share of the copy bandwidth | {share:.0%} |" + " |" * 7)
    return text


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, nargs="+", default=[torch.get_num_threads(), 1])
    parser.add_argument("--format", choices=FORMATS, default="int4")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each shape and M")
    parser.add_argument("--sample-ms", type=float, default=0.3)
    parser.add_argument("--only", default="", help="a part of the products' names")
    options = parser.parse_args()
    rows: list[dict] = []
    bandwidth: dict[int, float] = {}
    for threads in options.threads:
        torch.set_num_threads(threads)
        for product in PRODUCTS:
            if options.only not in product.name:
                continue
            # The most that was seen: a busy machine shows less at times.
            bandwidth[threads] = max(bandwidth.get(threads, 0), copy_bandwidth())
            spec = FORMATS[options.format]
            weight = spec.random(product.n, product.k, CPU)
            times = measure(product, spec, options.seconds, options.sample_ms / 1000)
            sizes = {
                name: LAYOUTS[name].pack(weight, torch.bfloat16).nbytes for name in times if name in LAYOUTS
            }
            row = {"product": product.name, "shape": [product.n, product.k], "threads": threads}
            rows.append(row | {"bytes": sizes, "microseconds": times})
            print("\n".join(lines(rows[-1:], bandwidth)[4:]), flush=True)
            write(rows, bandwidth, options.format)


def write(rows: list[dict], bandwidth: Mapping[int, float], name: str) -> None:
    """What has been measured so far."""
    result = {
        "device": device_name(CPU),
        "versions": kernel_versions(),
        "format": FORMATS[name].key,
        "copy_bytes_a_second": bandwidth,
        "load_average": round(os.getloadavg()[0], 1),
        "rows": rows,
    }
    write_json(RESULTS / f"{name}_cpu.json", result)
    head = f"{device_name(CPU)}, {FORMATS[name].label}, load average {result['load_average']}"
    text = [f"{head}.", NOISE, "", *lines(rows, bandwidth)]
    (RESULTS / f"{name}_cpu.md").write_text("\n".join(text) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
