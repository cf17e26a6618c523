"""All kernels that a server may launch on a GPU of one compute capability.

Engines are started for every KV format, and every layout of the registry multiplies. Nothing is listed by
hand but shapes. Not a test by itself.
"""

import itertools
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
import torch
from scalegate.base.errors import UserError
from scalegate.kernels.fp8.fused_rounding import norm_and_round, silu_and_round
from scalegate.kernels.sampling.top_k import top_k
from scalegate.kernels.states.batch import StateBatch
from scalegate.layouts.formats.fp8 import FP8
from scalegate.layouts.formats.int4 import Int4
from scalegate.layouts.formats.iq2_xxs import IQ2XXS
from scalegate.layouts.formats.nvfp4 import NVFP4
from scalegate.layouts.formats.unquantized import Unquantized
from scalegate.layouts.formats.weight_format import WEIGHT_FORMATS
from scalegate.layouts.kv.format import KV_FORMATS
from scalegate.layouts.modules.gated_experts import GatedExpertsLayout
from scalegate.layouts.packing import trial
from scalegate.layouts.packing.all_layouts import LAYOUTS
from scalegate.layouts.packing.layout import Experts, ExpertsLayout, PackedWeight, Problem
from scalegate.layouts.packing.routing import Routing
from scalegate.layouts.states.all_states import STATE_FORMATS
from scalegate.layouts.states.gated_delta_rule import DeltaInputs
from scalegate.layouts.states.last_inputs import LastInputs
from scalegate.layouts.states.linear_recurrence import RecurrenceInputs
from scalegate.layouts.states.mamba1 import Mamba1Inputs
from scalegate.layouts.states.mamba2 import Mamba2Inputs
from scalegate.layouts.states.short_convolution import ConvolutionInputs
from scalegate.layouts.states.state_format import StateInputs
from scalegate.serving_check.engine import cuda_runner
from scalegate.serving_check.engine.compiling import cuda_graphs, triton_settings
from scalegate.serving_check.engine.engine import Engine
from scalegate.serving_check.engine.forward import Forward
from scalegate.serving_check.engine.options import EngineOptions
from scalegate.serving_check.engine.request import SamplingParams
from scalegate.tests.kernels.architectures.pretended_gpu import GPU, LaunchRecord, pretended_gpu
from transformers import AutoConfig, AutoModelForCausalLM

NOT_OURS = ("tinygemm", "humming", "gemlite")
"""Layouts whose kernels other packages bring."""
SIZES = {
    "max_num_seqs": 64,
    "max_model_len": 2048,
    "kv_cache_tokens": 8192,
    "prefill_chunk": 1100,
    "compiled": True,
}
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
}
QWEN3 = {"model_type": "qwen3", "head_dim": 128}
GEMMA2 = {"model_type": "gemma2", "head_dim": 256, "sliding_window": 512}
GPT_OSS = {"model_type": "gpt_oss", "head_dim": 64, "num_local_experts": 8, "num_experts_per_tok": 4}
"""Between them: heads of 64, 128 and 256 channels, windows, soft caps, sinks, and unquantized experts."""
E4M3_CAPABILITY = 89
INVARIANT = ("pin", "per-token")
ROWS = (1, 8, 16, 32, 64, 128, 1024)
"""Of x: one in each bucket of every product."""
TOKENS = 4
"""Of a step of layers with a state."""
N, K = 256, 1024
EXPERTS = Experts(count=8, top_k=4)
FEW_ROWS = (1, 32)
WITH_ALL_ROWS = (Int4, Unquantized, IQ2XXS, FP8)
"""Formats that are multiplied by every number of rows; the kernels of the others are those of INT4."""


class Graph:
    """A CUDA graph that is replayed by doing nothing."""

    def replay(self) -> None: ...


class InThisThread:
    """An executor that does at once what it is given: what pretends a GPU holds in one thread."""

    def __init__(self, workers: int): ...
    def __enter__(self) -> "InThisThread":
        return self

    def __exit__(self, *error: object) -> None: ...
    def submit(self, work: Any) -> Future:
        done: Future = Future()
        done.set_result(work())
        return done


def record(capability: int) -> LaunchRecord:
    """Every form of a kernel that is launched on this compute capability, such as 89."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pretended_gpu(capability) as recording, pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_graphs.CudaGraphs, "_record", lambda self, run: (Graph(), run()))
        patch.setattr(cuda_runner, "ThreadPoolExecutor", InThisThread)
        # Inductor's kernels are its own, and compile as the server starts.
        patch.setattr(Forward, "compile", lambda self: None)
        patch.setattr(triton_settings, "settle", lambda: None)
        patch.setattr(trial, "REASONS", {})
        for name in KV_FORMATS:
            serve(QWEN3, kv_cache_dtype=name)
        for config in (GEMMA2, GPT_OSS):
            serve(config)
        for mode in INVARIANT:
            serve(QWEN3, batch_invariance=mode)
        for problem, rows in problems():
            multiply(problem, rows)
        top_k(torch.zeros(4, 128, dtype=torch.bfloat16), 8)
        if capability >= E4M3_CAPABILITY:
            round_where_made()
        for inputs in (*state_inputs(torch.bfloat16), *state_inputs(torch.float32)):
            compute_states(inputs)
    torch.set_num_threads(threads)
    return recording


def serve(config: dict[str, Any], **options: Any) -> None:
    """Start an engine as a server does, warm it up, and answer a short prompt and one of several chunks.

    What the engine itself refuses on this GPU is not launched.
    """
    settings = AutoConfig.for_model(**{**SMALL, **config})
    model = AutoModelForCausalLM.from_config(settings, dtype=torch.bfloat16).eval()
    model.set_experts_implementation("eager")  # until they are packed
    try:
        engine = Engine(model, EngineOptions(**{**SIZES, **options}), frozenset())
    except UserError as refusal:
        assert "compute capability" in str(refusal), refusal
        return
    engine.warm_up(progress=False)
    engine.generate([[1] * 1200, [2] * 5], SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True))


def problems() -> Iterator[tuple[Problem, tuple[int, ...]]]:
    """Every format with every number of rows; what only changes how numbers are decoded, with one of them."""
    for _, cls in WEIGHT_FORMATS.items():
        first, *others = cls.variants()
        more = [*map(Int4, (32, 64)), Int4(zero_point="fractional")]
        others += more if cls is Int4 else []
        others += [NVFP4(activations=True)] if cls is NVFP4 else []
        for experts in (None, EXPERTS):
            all_rows = ROWS if cls in WITH_ALL_ROWS else FEW_ROWS
            yield Problem(first, N, K, torch.bfloat16, GPU, experts), all_rows
            yield Problem(first, N, K, torch.float16, GPU, experts), FEW_ROWS
            for mode in INVARIANT if experts is None else ():
                yield Problem(first, N, K, torch.bfloat16, GPU, experts, mode), FEW_ROWS
            for spec in others:
                yield Problem(spec, N, K, torch.bfloat16, GPU, experts), FEW_ROWS


def multiply(problem: Problem, rows: tuple[int, ...]) -> None:
    """By every layout of ours that serves the problem."""
    for name, layout in LAYOUTS.items():
        if name in NOT_OURS or layout.refuses(problem) is not None:
            continue
        weight = packed(layout, problem)
        for m in rows:
            x = torch.zeros(m, problem.k, dtype=problem.dtype, device=GPU)
            if isinstance(layout, ExpertsLayout):
                expert = torch.zeros(m, EXPERTS.top_k, dtype=torch.int64, device=GPU)
                routing = Routing.of(expert, EXPERTS.count, problem.batch_invariance)
                layout.grouped_matmul(x, weight, routing)
            else:
                layout.matmul(x, weight)
        if isinstance(layout, ExpertsLayout) and isinstance(layout, GatedExpertsLayout):
            gated(layout, problem)


def gated(layout: GatedExpertsLayout, problem: Problem) -> None:
    """A layer's experts in one op, for one token and for several."""
    gate_up, down = (packed(layout, replace(problem, n=n, k=k)) for n, k in ((2 * N, K), (K, N)))
    for tokens in FEW_ROWS:
        x = torch.zeros(tokens, K, dtype=problem.dtype, device=GPU)
        expert = torch.zeros(tokens, EXPERTS.top_k, dtype=torch.int64, device=GPU)
        layout.gated_experts(x, expert, torch.zeros(expert.shape, device=GPU), gate_up, down)


def round_where_made() -> None:
    """Norms and SiLU times up with their rounding, as a pass over compiled layers puts them in."""
    weight = torch.zeros(K, dtype=torch.bfloat16, device=GPU)
    for rows in ROWS:
        x = torch.zeros(rows, K, dtype=torch.bfloat16, device=GPU)
        for residual, keeps in itertools.product((None, x), (False, True)):
            norm_and_round(x, residual, weight, 1e-6, keeps)
        silu_and_round(torch.zeros(rows, 2 * 3 * K, dtype=torch.bfloat16, device=GPU))


def state_inputs(dtype: torch.dtype) -> Iterator[StateInputs]:
    """Every state format's, of common shapes; of the gated delta rule, which spills in float32, bf16 only."""

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=GPU)

    x, rates = zeros(TOKENS, 512), torch.zeros(512, 16, device=GPU)
    yield ConvolutionInputs(x, zeros(512, 4), zeros(512))
    yield LastInputs(x, 2)
    yield RecurrenceInputs(x, x.float())
    yield Mamba1Inputs(x, x, zeros(TOKENS, 16), zeros(TOKENS, 16), rates, zeros(512))
    x, step = zeros(TOKENS, 8, 64), zeros(TOKENS, 8)
    for state_dim in (128, 256) if dtype == torch.bfloat16 else (128,):
        b = zeros(TOKENS, 2, state_dim)
        yield Mamba2Inputs(x, step, b, b, rates[:8, 0], zeros(8))
    key, value = zeros(TOKENS, 2, 128), zeros(TOKENS, 4, 128)
    for decay in (value[..., 0], value) if dtype == torch.bfloat16 else ():
        yield DeltaInputs(key, key, value, decay.float().contiguous(), zeros(TOKENS, 4))


def compute_states(inputs: StateInputs) -> None:
    """In a step of single tokens, and in one with prompts."""
    state_format = next(known for _, known in STATE_FORMATS.items() if known.inputs is type(inputs))
    shape = state_format.shape(inputs)
    slots = torch.zeros((TOKENS, *shape.dims), dtype=shape.dtype, device=GPU)
    output = torch.zeros_like(inputs.value if isinstance(inputs, DeltaInputs) else inputs.x)
    if isinstance(inputs, LastInputs):
        output = torch.zeros(*inputs.x.shape, inputs.width + 1, dtype=inputs.x.dtype, device=GPU)
    for decode_only in (True, False):
        starts, lengths = (torch.zeros(n, dtype=torch.int32, device=GPU) for n in (TOKENS + 1, TOKENS))
        batch = StateBatch(starts, lengths, lengths.long(), decode_only)
        state_format.run_kernels(inputs, slots, batch, output)


def packed(layout: Any, problem: Problem) -> PackedWeight:
    weight = problem.spec.random(problem.n, problem.k, problem.device)
    if isinstance(layout, ExpertsLayout):
        return layout.pack_experts([weight] * EXPERTS.count, problem.dtype)
    return layout.pack(weight, problem.dtype)
