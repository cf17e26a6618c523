"""Where the time of a decode step on a CPU goes: products, norms, attention, sampling, and what is left.

    python -P tests/bench/engine/cpu_step.py CHECKPOINT [MORE ...] [--m 1 8 32] [--steps 400]

Runs the engine in this process and wraps the calls of each part with a clock of this thread's CPU time. The
table has microseconds: for each part the least quarter's average over all steps, so that other load on the
machine hardly shows. A part that is called by another one counts under its own name only. The clocks take
about 0.5 µs a call, which is in the figures. Not for the HTTP side: cpu_server.py has it.
"""

import argparse
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from scalegate.base.atomic_files import write_json
from scalegate.kernels.cpu.calls import Call
from scalegate.layouts.choosing.plan import device_name
from scalegate.layouts.modules.linear import QuantizedLinear
from scalegate.pipeline.commands.llm import LLM
from scalegate.pipeline.machine.cores import model_threads
from scalegate.serving_check.engine.attention import PagedAttention
from scalegate.serving_check.engine.dense.program import Part, Program
from scalegate.serving_check.engine.request import SamplingParams
from torch import nn

RESULTS = Path(__file__).parents[1] / "results" / "engine" / "cpu_step.json"
PROMPT_TOKENS = 64
LAYER_PARTS = (
    "norms, residuals",
    "product: layers",
    "rotary embedding, norms of heads",
    "attention over pages",
    "product: layers",
    "norms, residuals",
    "product: layers",
    "activation",
    "product: layers",
)
"""Of each layer in a `Program`."""
LEAST = 0.25
"""The share of a part's times that is averaged."""


class Parts:
    """Microseconds by part, of one step; time inside an inner part is taken from the outer one."""

    def __init__(self) -> None:
        self.of_step: dict[str, float] = {}
        self._inner: list[float] = []

    def timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0.0)
            start = time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                taken = time.thread_time() - start
                inner = self._inner.pop()
                self.of_step[part] = self.of_step.get(part, 0.0) + (taken - inner) * 1e6
                if self._inner:
                    self._inner[-1] += taken

        return wrapper

    def wrap(self, part: str, owner: Any, name: str) -> None:
        setattr(owner, name, self.timed(part, getattr(owner, name)))


def wrap_model(model: Any, parts: Parts) -> None:
    head = model.get_output_embeddings()
    for module in model.modules():
        kind = type(module).__name__
        if module is head:
            parts.wrap("product: logits", module, "forward")
        elif isinstance(module, nn.Linear | QuantizedLinear):
            parts.wrap("product: layers", module, "forward")
        elif kind.endswith("Norm"):
            parts.wrap("norms", module, "forward")
        elif kind.endswith("RotaryEmbedding"):
            parts.wrap("rotary embedding: table", module, "forward")
        elif kind.endswith(("SiLU", "SiLUActivation", "GELU", "GELUActivation", "GELUTanh")):
            parts.wrap("activation", module, "forward")
        elif kind.endswith("MLP"):
            parts.wrap("MLP's own", module, "forward")
        elif kind.endswith("Attention"):
            parts.wrap("attention module's own", module, "forward")
        elif kind.endswith("DecoderLayer"):
            parts.wrap("layer's own, residuals", module, "forward")
    parts.wrap("model's own", model, "forward")
    modeling = __import__(type(model).__module__, fromlist=["_"])
    if hasattr(modeling, "apply_rotary_pos_emb"):
        parts.wrap("rotary embedding: applied", modeling, "apply_rotary_pos_emb")


def split_program(parts: Parts) -> None:
    """Make the programs of dense models run call by call, each timed as its part."""

    def apart(program: Program, all_parts: Iterable[Call | Part]) -> list[Part]:
        each = [program._calls_part([part]) if isinstance(part, Call) else part for part in all_parts]
        # After the embedding, if it is a call, and before the last norm.
        layers = (len(each) - 1) // len(LAYER_PARTS)
        names = [*["embedding"] * ((len(each) - 1) % len(LAYER_PARTS)), *LAYER_PARTS * layers, LAYER_PARTS[0]]
        return [parts.timed(name, part) for name, part in zip(names, each, strict=True)]

    Program._joined = apart  # type: ignore[method-assign]


def wrap_step(forward: Any, parts: Parts) -> None:
    """Time the parts of steps that call no modules of the model's."""
    parts.wrap("step's own", forward, "_compute")
    if forward._dense is not None:
        parts.wrap("product: logits", forward._dense._program, "head")


def profile(folder: str, counts: list[int], steps: int) -> list[dict[str, Any]]:
    rows = []
    parts, joined = Parts(), Program._joined
    split_program(parts)
    with LLM(folder, progress=False, max_num_seqs=max(counts)) as llm:
        engine = llm._engine
        attend = PagedAttention.layer
        PagedAttention.layer = parts.timed("attention over pages", attend)  # type: ignore[method-assign]
        runner = engine.runner
        wrap_model(runner.model, parts)
        wrap_step(runner._forward, parts)
        parts.wrap("staging the step", runner._buffers, "stage")
        parts.wrap("staging the step", runner._buffers, "input")
        parts.wrap("drawing tokens", runner, "_draw")
        parts.wrap("runner's own", runner, "run")
        parts.wrap("engine's own", engine, "step")
        for count in counts:
            rows.append({"m": count, **one_count(engine, parts, count, steps)})
            print(folder, rows[-1], flush=True)
    PagedAttention.layer, Program._joined = attend, joined  # type: ignore[method-assign]
    return rows


def one_count(engine: Any, parts: Parts, count: int, steps: int) -> dict[str, Any]:
    """steps of `count` requests: rounds of 64 tokens after 64."""
    params = SamplingParams(max_tokens=PROMPT_TOKENS, temperature=0.0, ignore_eos=True)
    found: list[dict[str, float]] = []
    while len(found) < steps:
        for index in range(count):
            engine.add_request(f"r{index}", [(7 * index + i) % 1000 for i in range(PROMPT_TOKENS)], params)
        while engine.has_work:
            parts.of_step = {}
            outputs = engine.step()
            if len(outputs) == count and all(
                len(s.tokens) > PROMPT_TOKENS + 1 for s in engine.scheduler.running
            ):
                found.append(parts.of_step)
    names = {name for step in found for name in step}
    means = {name: least(step.get(name, 0.0) for step in found) for name in names}
    means = dict(sorted(means.items(), key=lambda item: -item[1]))
    return {"step_us": round(sum(means.values()), 1), "parts_us": means}


def least(times: Iterable[float]) -> float:
    ordered = sorted(times)
    return round(fmean(ordered[: max(1, round(len(ordered) * LEAST))]), 1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoints", nargs="+")
    parser.add_argument("--m", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--threads", type=int, default=model_threads(), help="as many as a server takes")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    found = {Path(folder).name: profile(folder, options.m, options.steps) for folder in options.checkpoints}
    cpu = device_name(torch.device("cpu"))
    write_json(options.out, {"cpu": cpu, "threads": torch.get_num_threads(), "checkpoints": found})


if __name__ == "__main__":
    main()
