"""Decides which layers are faster with our kernels than with vLLM's own, from measurements.

`measured.json` is made by `tests/bench/vllm_plugin/linear.py` on a GPU. A layer has one kernel for every M,
since a second one would need the weight a second time. One decision is therefore made for a layer, from all
M.
"""

import json
import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

MEASURED = Path(__file__).with_name("measured.json")

DECODING = 128
"""A step of up to this many tokens counts as decoding, a larger one as prefill."""
LEAST_GAIN = 1.05
"""The least geometric mean of the ratios at decoding sizes. Two machines of a kind differ by some percent."""
LEAST_GAIN_OF_PROMPTS = 0.97
"""The same of prompts. With 2048 tokens in and 32 out, decoding is a seventh of the time: what it gains at
least where a layer decodes 1.3 times as fast is 3%."""
LEAST_RATIO, LEAST_RATIO_OF_PROMPTS = 1.0, 0.9
"""The least ratio at any measured M. It is lower for prompts, whose M changes from step to step."""

ShapeClass = tuple[int, int]


@dataclass(frozen=True)
class Gpu:
    """The GPUs that a measurement is valid for: one architecture, and one number of SMs."""

    capability: tuple[int, int]
    sms: int

    @classmethod
    def of(cls, device: torch.device) -> "Gpu":
        properties = torch.cuda.get_device_properties(device)
        return cls((properties.major, properties.minor), properties.multi_processor_count)


@dataclass(frozen=True)
class Row:
    """One shape in one format: microseconds of our product and of vLLM's own, by M."""

    format: str
    dtype: str
    n: int
    k: int
    m: tuple[int, ...]
    ours_us: tuple[float, ...]
    vllm_us: tuple[float, ...]
    vllm_kernel: str

    @property
    def ratios(self) -> dict[int, float]:
        """Return the speed of our kernel divided by the speed of vLLM's kernel, for each M."""
        return {m: theirs / ours for m, ours, theirs in zip(self.m, self.ours_us, self.vllm_us, strict=True)}


Rows = dict[tuple[Gpu, str, str, ShapeClass], list[Row]]


@dataclass(frozen=True)
class Decision:
    """Whether the plugin serves a layer, and the reason in a few words."""

    ours: bool
    reason: str


def shape_class(n: int, k: int) -> ShapeClass:
    """Return the powers of two that are nearest to N and to K."""
    return round(math.log2(n)), round(math.log2(k))


@lru_cache
def measured(path: Path = MEASURED) -> Rows:
    """Return the measurements in the file, by GPU, format, dtype and class of shapes."""
    found: Rows = {}
    for measurement in json.loads(path.read_text(encoding="utf-8"))["measurements"]:
        gpu = Gpu(tuple(measurement["capability"]), measurement["sms"])
        for fields in measurement["rows"]:
            lists = {name: tuple(fields[name]) for name in ("m", "ours_us", "vllm_us")}
            row = Row(**{**fields, **lists})
            found.setdefault((gpu, row.format, row.dtype, shape_class(row.n, row.k)), []).append(row)
    return found


def decide(gpu: Gpu, weight_format: str, dtype: torch.dtype, n: int, k: int, rows: Rows) -> Decision:
    """Decide by the measurement of this shape, or, if there is none, by the slowest shape of its class.

    Layers without a measurement are left to vLLM.
    """
    kind = weight_format, str(dtype).removeprefix("torch.")
    if not any(known == gpu for known, *_ in rows):
        return Decision(False, f"not measured on this GPU ({gpu.sms} SMs of {gpu.capability})")
    alike = rows.get((gpu, *kind, shape_class(n, k)))
    if not alike:
        return Decision(False, "no shape like it was measured")
    alike = [row for row in alike if (row.n, row.k) == (n, k)] or alike
    refusal = next(filter(None, map(refusal_by, alike)), None)
    if refusal is not None:
        return Decision(False, refusal)
    worst = min(alike, key=gain)
    return Decision(True, f"{gain(worst):.2f} times as fast as {worst.vllm_kernel} up to M={DECODING}")


def gain(row: Row) -> float:
    """Return the geometric mean of a shape's ratios at decoding sizes."""
    return geometric_mean([ratio for m, ratio in row.ratios.items() if m <= DECODING])


def geometric_mean(ratios: list[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def refusal_by(row: Row) -> str | None:
    """Return why a measured shape is left to vLLM; None if it is ours."""
    if gain(row) < LEAST_GAIN:
        return f"{gain(row):.2f} times as fast as {row.vllm_kernel} up to M={DECODING}"
    of_prompts = geometric_mean([ratio for m, ratio in row.ratios.items() if m > DECODING])
    if of_prompts < LEAST_GAIN_OF_PROMPTS:
        return f"{of_prompts:.2f} times as fast as {row.vllm_kernel} beyond M={DECODING}"
    for m, ratio in row.ratios.items():
        if ratio < (LEAST_RATIO if m <= DECODING else LEAST_RATIO_OF_PROMPTS):
            return f"{ratio:.2f} times as fast as {row.vllm_kernel} at M={m}"
    return None
