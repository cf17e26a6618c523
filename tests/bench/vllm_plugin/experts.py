"""Times our experts and vLLM's own in vLLM's fused-MoE layers, and adds them to the plugin's table.

    python -P tests/bench/vllm_plugin/experts.py --out OUT --check
    python -P tests/bench/vllm_plugin/experts.py --out OUT --table vllm_plugin/measured.json

For an environment with vLLM and the wheel `scalegate-kernels`. A layer is what vLLM calls after its router:
both products, the activation, the weighted sum. Both sides run in CUDA graphs, interleaved, on weights that
the L2 cache does not hold, with random routings; their answers are compared before they are timed. `--table`
takes the place of all rows of experts there.
"""

import argparse
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from scalegate.layouts.choosing.timing import TimingBudget, interleaved_microseconds
from scalegate.tests.bench.vllm_plugin.checkpoints import (
    CODE_STD,
    CONVENTIONS,
    STD,
    middling_zeros,
    words,
)
from scalegate.tests.bench.vllm_plugin.layers import OURS, set_disabled, vllm_alone
from scalegate.tests.bench.vllm_plugin.linear import KEYS, MOST_DIFFERENCE
from torch import Tensor

MS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2048, 8192)
ROTATED_BYTES = 100e6
BUDGET = TimingBudget(samples=9, seconds=0.1, warmup_calls=2)
ROUTINGS = 8
"""Random choices of experts that are used in turn."""


@dataclass(frozen=True)
class Shape:
    """A layer: `top_k` of `experts` a token, [hidden] to [inner] and back."""

    name: str
    experts: int
    top_k: int
    hidden: int
    inner: int


SHAPES = (
    Shape("Qwen3-30B-A3B", 128, 8, 2048, 768),
    Shape("Qwen3-235B-A22B", 128, 8, 4096, 1536),
    Shape("Qwen3-30B-A3B of two ranks", 128, 8, 2048, 384),
    Shape("Mixtral-8x7B", 8, 2, 4096, 14336),
)
KINDS = (("int4-sym", "bfloat16"), ("nvfp4", "bfloat16"), ("int4-zp", "bfloat16"), ("int4-sym", "float16"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--table", type=Path, help="the plugin's table, whose rows of experts are replaced")
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="measure the first of them only")
    parser.add_argument("--conventions", nargs="+", default=sorted({each for each, _ in KINDS}))
    parser.add_argument("--seconds", type=float, default=250)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    rows: list[dict[str, Any]] = []
    with vllm_alone(max(MS)), torch.no_grad():
        from vllm.v1.worker.workspace import init_workspace_manager

        init_workspace_manager(torch.device("cuda", 0))
        for shape in SHAPES[: options.shapes]:
            for convention, dtype in KINDS:
                if convention not in options.conventions:
                    continue
                if time.monotonic() - started > options.seconds:
                    print(f"no time for {shape.name} {convention} {dtype}", flush=True)
                    continue
                row = measured(shape, convention, getattr(torch, dtype), (1, 5, 40) if options.check else MS)
                rows.append(row)
                pairs = zip(row["ours_us"], row["vllm_us"], strict=True)
                ratios = " ".join(f"{ours:.0f}/{theirs:.0f}={theirs / ours:.2f}" for ours, theirs in pairs)
                print(f"{shape.name} {convention} {dtype} {row['vllm_kernel']}: {ratios}", flush=True)
                (options.out / "experts.json").write_text(json.dumps(rows, indent=1))
    print(f"{len(rows)} layers in {time.monotonic() - started:.0f} s; M = {MS}; us ours/vLLM = gain")
    if options.table and not options.check:
        write(options.table, rows)


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """The table with these rows of experts in place of those that it has for this GPU."""
    import triton
    import vllm

    table = json.loads(path.read_text(encoding="utf-8"))["measurements"]
    properties = torch.cuda.get_device_properties(0)
    here = [properties.major, properties.minor], properties.multi_processor_count
    for measurement in table:
        if (measurement["capability"], measurement["sms"]) == here:
            measurement["rows"] = [
                row for row in measurement["rows"] if " experts, top " not in row["format"]
            ]
    versions = {"vllm": vllm.__version__, "torch": torch.__version__, "triton": triton.__version__}
    gpu = {"gpu": properties.name, "capability": here[0], "sms": here[1], "versions": versions}
    table = [*(each for each in table if each["rows"]), {**gpu, "rows": rows}]
    parts = []
    for measurement in table:
        head = json.dumps({**measurement, "rows": []}).removesuffix("[]}")
        parts.append(head + "[\n" + ",\n".join(json.dumps(row) for row in measurement["rows"]) + "\n]}")
    path.write_text('{"measurements": [' + ",\n".join(parts) + "]}\n", encoding="utf-8")


def measured(shape: Shape, convention: str, dtype: torch.dtype, ms: tuple[int, ...]) -> dict[str, Any]:
    """One row of the table."""
    torch.manual_seed(0)
    first = layer_of(shape, convention, dtype, ours=True, like=None)
    nbytes = sum(tensor.nbytes for tensor in first.loaded.values())
    copies = max(1, math.ceil(ROTATED_BYTES / nbytes))
    layers = {
        ours: [
            first if ours and i == 0 else layer_of(shape, convention, dtype, ours, first.loaded)
            for i in range(copies)
        ]
        for ours in (True, False)
    }
    ours_us, vllm_us = [], []
    for m in ms:
        x = torch.randn(m, shape.hidden, device="cuda").to(dtype)
        routings = [routing_of(m, shape) for _ in range(ROUTINGS)]
        answers = [layers[which][0](x, *routings[0]).double() for which in (False, True)]
        apart = float((answers[1] - answers[0]).norm() / answers[0].norm())
        if not apart < MOST_DIFFERENCE:
            raise SystemExit(f"{shape.name} {convention} at M={m}: the answers differ by {apart:.1e}")
        calls = {
            str(which): (lambda i, x=x, each=each, taken=routings: each[i % copies](x, *taken[i % ROUTINGS]))
            for which, each in layers.items()
        }
        turns = math.lcm(copies, ROUTINGS) if copies > 1 else ROUTINGS
        microseconds = interleaved_microseconds(calls, turns, torch.device("cuda"), BUDGET)
        ours_us.append(round(microseconds["True"], 2))
        vllm_us.append(round(microseconds["False"], 2))
    kernel = layers[False][0].kernel
    kind = f"{KEYS[convention]} ({shape.experts} experts, top {shape.top_k})"
    del layers, first
    torch.cuda.empty_cache()
    return {
        "format": kind, "dtype": str(dtype).removeprefix("torch."), "n": 2 * shape.inner, "k": shape.hidden,
        "m": list(ms), "ours_us": ours_us, "vllm_us": vllm_us, "vllm_kernel": kernel,
    }  # fmt: skip


def routing_of(m: int, shape: Shape) -> tuple[Tensor, Tensor]:
    """Random shares, and experts of each token; vLLM's types."""
    scores = torch.rand(m, shape.experts, device="cuda")
    share, expert = scores.softmax(-1).topk(shape.top_k, -1)
    return (share / share.sum(-1, keepdim=True)).float(), expert.int()


class Layer:
    """A layer of vLLM that is ready to multiply; `loaded`: its parameters as they were loaded."""

    def __init__(self, module: Any, loaded: dict[str, Tensor]):
        self.module = module
        self.loaded = loaded
        experts = module.quant_method.moe_kernel.fused_experts
        is_ours = type(experts).__name__ in OURS.split(",") and module.w13_weight.dim() > 3
        self.kernel = "ours" if is_ours else "MarlinExperts"

    def __call__(self, x: Tensor, share: Tensor, expert: Tensor) -> Tensor:
        return self.module.quant_method.apply(self.module, x, share, expert, None, None)


MADE = 0


def layer_of(
    shape: Shape, convention: str, dtype: torch.dtype, ours: bool, like: dict[str, Tensor] | None
) -> Layer:
    """A layer as vLLM loads it, with random weights or those of another one."""
    global MADE
    from vllm.model_executor.layers.fused_moe import FusedMoE
    from vllm.model_executor.layers.quantization import get_quantization_config

    MADE += 1
    section = CONVENTIONS[convention].quantization
    set_disabled(not ours)
    config = get_quantization_config(section["quant_method"]).from_config(section)
    config.packed_modules_mapping = {}
    with torch.device("cuda"):
        runner = FusedMoE(
            num_experts=shape.experts, top_k=shape.top_k, hidden_size=shape.hidden,
            intermediate_size=shape.inner, params_dtype=dtype, quant_config=config,
            prefix=f"model.layers.{MADE}.mlp.experts",
        )  # fmt: skip
    module = runner.routed_experts
    loaded = like or {name: random_like(name, each.data) for name, each in module.named_parameters()}
    for name, parameter in module.named_parameters():
        parameter.data.copy_(loaded[name])
    module.quant_method.process_weights_after_loading(module)
    layer = Layer(module, loaded)
    if (layer.kernel == "ours") != ours:
        raise SystemExit(f"{shape.name} {convention}: served by {layer.kernel}")
    return layer


def random_like(name: str, parameter: Tensor) -> Tensor:
    """Numbers as `checkpoints.py` draws them for a parameter of this name."""
    uniform = torch.rand(parameter.shape, device="cuda")
    if parameter.dtype == torch.float8_e4m3fn:
        return uniform.mul(200).add(100).to(parameter.dtype)
    if name.endswith("weight_global_scale"):
        return torch.full_like(parameter, 200 * 3 / STD)
    if name.endswith("weight_scale"):
        return uniform.add(0.5).mul(STD / CODE_STD).to(parameter.dtype)
    if name.endswith("zero_point"):
        return middling_zeros(parameter.shape[0] * parameter.shape[1], parameter.shape[2]).view(
            parameter.shape
        )
    if name.endswith("weight_packed"):
        return words(*parameter.shape) if parameter.dtype == torch.int32 else uniform.mul(256).to(torch.uint8)
    return torch.ones_like(parameter) if parameter.is_floating_point() else torch.zeros_like(parameter)


if __name__ == "__main__":
    main()
