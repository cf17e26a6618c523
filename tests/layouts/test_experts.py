"""Products of experts on a CPU: against dequantized weights, and within transformers' own experts modules."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from scalegate.base.errors import UserError
from scalegate.layouts.choosing.measure import measure
from scalegate.layouts.choosing.timing import TimingBudget
from scalegate.layouts.formats.int4 import Int4
from scalegate.layouts.formats.int8 import Int8
from scalegate.layouts.formats.nvfp4 import NVFP4, NVFP4Input
from scalegate.layouts.formats.unquantized import Unquantized, UnquantizedWeight
from scalegate.layouts.formats.weight_format import Weight, WeightFormat
from scalegate.layouts.modules.experts import (
    ExpertsPart,
    PackedExperts,
    is_experts,
    pack_unquantized_experts,
    parameters_of,
    stack_inputs,
)
from scalegate.layouts.packing.all_layouts import LAYOUTS
from scalegate.layouts.packing.layout import Experts, ExpertsLayout, Problem
from scalegate.layouts.packing.routing import Routing
from scalegate.tests.rounding_bounds import CASTING_BOUND, product_bound
from torch import Tensor, nn
from transformers import DeepseekV3Config, GptOssConfig, MixtralConfig, Qwen2MoeConfig, Qwen3MoeConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Experts
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

CPU = torch.device("cpu")
HIDDEN, WIDTH = 128, 96
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def relative_error(y: Tensor, expected: Tensor) -> float:
    return ((y.double() - expected.double()).norm() / expected.double().norm()).item()


def routed(tokens: int, top_k: int, count: int) -> Tensor:
    """Different experts for each token; the last one gets none, where there are enough others."""
    candidates = count - 1 if count > top_k else count
    return torch.rand(tokens, candidates).argsort(-1)[:, :top_k].contiguous()


def serving(problem: Problem) -> dict[str, ExpertsLayout]:
    return {name: layout for name, layout in LAYOUTS.items() if layout.refuses(problem) is None}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "spec", [Int4(32), Int4(64, zero_point="fractional"), Int8(32), NVFP4(), Unquantized()], ids=str
)
@pytest.mark.parametrize(
    ("count", "top_k", "n", "k"), [(1, 1, 24, 64), (4, 1, 40, 192), (8, 3, 56, 128), (5, 5, 16, 64)]
)
def test_every_row_is_multiplied_by_its_experts_weight(
    dtype: torch.dtype, spec: WeightFormat, count: int, top_k: int, n: int, k: int
):
    problem = Problem(spec, n, k, dtype, CPU, Experts(count, top_k))
    layouts = serving(problem)
    assert len(layouts) >= (1 if isinstance(spec, NVFP4 | Unquantized) else 2)
    weights = [spec.random(n, k, CPU) for _ in range(count)]
    dense = torch.stack(
        [weight.dequantize(dtype if isinstance(spec, Unquantized) else torch.float64) for weight in weights]
    )
    for tokens in (1, 2, 17):
        expert = routed(tokens, top_k, count)
        routing = Routing.of(expert, count)
        for rows in (tokens, tokens * top_k):
            x = torch.randn(rows, k).to(dtype)
            each = x.double().repeat_interleave(tokens * top_k // rows, 0)
            expected = torch.einsum("rk,rnk->rn", each, dense.double()[expert.flatten()])
            for name, layout in layouts.items():
                packed = layout.pack_experts(weights, dtype)
                assert packed.shape == (count, n, k) and packed.spec == spec and packed.layout == name
                y = layout.grouped_matmul(x, packed, routing)
                assert y.dtype is dtype and y.shape == (tokens * top_k, n), name
                bound = CASTING_BOUND if "cast" in name else product_bound(dtype, k)
                slack = 1 if y.numel() >= 256 else 3
                assert relative_error(y, expected) <= slack * bound, (name, tokens, rows)


def test_a_row_given_to_another_expert_is_seen_by_these_bounds():
    weights = [Int4(32).random(24, 64, CPU) for _ in range(4)]
    layout = LAYOUTS["cpu_int4_per_expert"]
    packed, x = layout.pack_experts(weights, torch.bfloat16), torch.randn(17, 64, dtype=torch.bfloat16)
    right = routed(17, 2, 4)
    wrong = right.clone()
    wrong[3, 1] = 3
    answers = [layout.grouped_matmul(x, packed, Routing.of(expert, 4)) for expert in (right, wrong)]
    assert relative_error(*answers) > 10 * product_bound(torch.bfloat16, 64)


def test_experts_are_measured_with_the_rows_that_they_really_get(monkeypatch: pytest.MonkeyPatch):
    problem = Problem(Int4(32), 24, 64, torch.bfloat16, CPU, Experts(8, 2))
    layout = LAYOUTS["cpu_int4_per_expert"]
    seen: set[tuple[int, int]] = set()

    class Spy:
        def __getattr__(self, name: str) -> object:
            return getattr(layout, name)

        def grouped_matmul(self, x: Tensor, packed: object, routing: Routing) -> Tensor:
            assert all(len(set(row)) == 2 for row in routing.expert.tolist()), "a token's experts differ"
            seen.add((len(x), routing.expert.numel()))
            return layout.grouped_matmul(x, packed, routing)

    monkeypatch.setitem(LAYOUTS._entries, layout.name, Spy())
    found = measure(problem, (1, 16), list(LAYOUTS), TimingBudget(samples=4, sample_seconds=0.0002))
    assert seen == {(1, 2), (16, 32)}
    assert {measurement.layout for measurement in found.measurements} == set(serving(problem))


def qwen3_moe() -> nn.Module:
    sizes = {"num_experts": 6, "moe_intermediate_size": WIDTH, "hidden_size": HIDDEN}
    return Qwen3MoeExperts(Qwen3MoeConfig(**sizes))


def qwen2_moe() -> nn.Module:
    sizes = {"num_experts": 6, "moe_intermediate_size": WIDTH, "hidden_size": HIDDEN}
    return Qwen2MoeExperts(Qwen2MoeConfig(**sizes))


def mixtral() -> nn.Module:
    return MixtralExperts(MixtralConfig(num_local_experts=6, intermediate_size=WIDTH, hidden_size=HIDDEN))


def gpt_oss() -> nn.Module:
    return GptOssExperts(GptOssConfig(num_local_experts=6, intermediate_size=WIDTH, hidden_size=HIDDEN))


def deepseek_v3() -> nn.Module:
    sizes = {"n_routed_experts": 6, "moe_intermediate_size": WIDTH, "hidden_size": HIDDEN}
    return DeepseekV3Experts(DeepseekV3Config(**sizes))


MODULES = [qwen3_moe, qwen2_moe, mixtral, gpt_oss, deepseek_v3]
EVERY = pytest.mark.parametrize("make", MODULES, ids=lambda make: make.__name__)
Make = Callable[[], nn.Module]


def module(make: Make) -> nn.Module:
    """With random weights, the same every time; transformers leaves them as memory was."""
    experts = make().float().requires_grad_(False).eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in experts.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return experts


def rows_of(experts: nn.Module, name: str) -> list[Tensor]:
    """The [N, K] weights of a parameter."""
    weight = experts.get_parameter(name).data
    return list(weight.transpose(1, 2) if experts.is_transposed else weight)


def shapes_of(experts: nn.Module) -> dict[str, tuple[int, ...]]:
    """[E, N, K] of each parameter."""
    return {name: tuple(weight.shape) for name, weight in parameters_of(experts).items()}


def packed_as(experts: nn.Module, layout: str, weights: dict[str, list[Weight]]) -> PackedExperts:
    pack = LAYOUTS[layout].pack_experts
    return PackedExperts(
        experts, {name: [ExpertsPart(pack(ws, torch.float32))] for name, ws in weights.items()}
    )


def step(tokens: int, top_k: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(tokens, HIDDEN), routed(tokens, top_k, 6), torch.rand(tokens, top_k)


def unquantized(rows: list[Tensor]) -> list[Weight]:
    return [UnquantizedWeight(Unquantized(), weight) for weight in rows]


@EVERY
@pytest.mark.parametrize("named", [("gate_up_proj", "down_proj"), ("down_proj",), ()], ids="+".join)
def test_unquantized_experts_compute_what_transformers_module_does(make: Make, named: tuple[str, ...]):
    """Parameters that are not named are taken from the module as they lie there."""
    theirs, experts = module(make), module(make)
    shapes = shapes_of(experts)
    ours = packed_as(experts, "torch_linear_per_expert", {n: unquantized(rows_of(experts, n)) for n in named})
    assert is_experts(theirs) and ours.shapes() == shapes
    assert shapes == {"gate_up_proj": (6, 2 * WIDTH, HIDDEN), "down_proj": (6, HIDDEN, WIDTH)}
    for tokens, top_k in ((1, 1), (1, 2), (9, 3), (40, 5)):
        given = step(tokens, top_k)
        y, expected = ours(*given), theirs(*given)
        assert y.shape == expected.shape and y.dtype is expected.dtype
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)


@EVERY
@pytest.mark.parametrize("layout", ["dequantize_per_expert", "cpu_int4_float32_per_expert"])
def test_int4_experts_compute_what_the_dequantized_module_does(make: Make, layout: str):
    theirs, experts = module(make), module(make)
    weights: dict[str, list[Weight]] = {}
    for name, (count, n, k) in shapes_of(experts).items():
        weights[name] = [Int4(32).random(n, k, CPU) for _ in range(count)]
        dense = torch.stack([weight.dequantize(torch.float32) for weight in weights[name]])
        original = theirs.get_parameter(name)
        original.copy_(dense.transpose(1, 2) if theirs.is_transposed else dense)
    ours = packed_as(experts, layout, weights)
    for tokens, top_k in ((1, 1), (9, 3), (40, 5)):
        given = step(tokens, top_k)
        assert relative_error(ours(*given), theirs(*given)) <= 4e-3
    # Negative control: a step too much in one group of every row of one expert.
    zero = weights["down_proj"][0].zero_point.clone()
    zero[:, 0] += 1
    weights["down_proj"][0] = replace(weights["down_proj"][0], zero_point=zero)
    given = (torch.randn(9, HIDDEN), torch.zeros(9, 1, dtype=torch.int64), torch.ones(9, 1))
    assert relative_error(packed_as(module(make), layout, weights)(*given), theirs(*given)) > 4e-3


@EVERY
def test_gate_and_up_that_do_not_merge_are_two_products_side_by_side(make: Make):
    """As where NVFP4's global scales differ."""
    theirs, experts = module(make), module(make)
    pack = LAYOUTS["torch_linear_per_expert"].pack_experts
    rows = rows_of(experts, "gate_up_proj")
    halves = [[row[:WIDTH] for row in rows], [row[WIDTH:] for row in rows]]
    parts = [ExpertsPart(pack(unquantized(half), torch.float32)) for half in halves]
    ours = PackedExperts(experts, {"gate_up_proj": parts})
    assert list(ours.packed) == ["gate_up_proj_0", "gate_up_proj_1", "down_proj_0"]
    assert ours.shapes() == shapes_of(theirs)
    given = step(9)
    torch.testing.assert_close(ours(*given), theirs(*given), rtol=1e-5, atol=1e-5)


@EVERY
def test_the_modules_own_weights_are_let_go_of_and_ours_move_with_it(make: Make):
    experts = module(make)
    before = sum(parameter.nbytes for parameter in experts.parameters())
    ours = packed_as(experts, "torch_linear_per_expert", {})
    assert not any(hasattr(experts, name) for name in ("gate_up_proj", "down_proj"))
    held = [*ours.parameters(), *ours.buffers()]
    assert sum(tensor.nbytes for tensor in held) == before
    moved = ours.to("meta")
    tensors = [tensor for packed in moved.packed.values() for tensor in packed.tensors.values()]
    assert {tensor.device.type for tensor in tensors} == {"meta"}


@EVERY
def test_a_models_unquantized_experts_are_all_packed(make: Make):
    theirs, model = module(make), nn.Sequential(nn.Linear(4, 4), module(make), nn.ModuleList([module(make)]))
    assert pack_unquantized_experts(model) == 2
    assert isinstance(model[1], PackedExperts) and isinstance(model[2][0], PackedExperts)
    assert pack_unquantized_experts(model) == 0, "what is packed stays as it is"
    given = step(9)
    for ours in (model[1], model[2][0]):
        torch.testing.assert_close(ours(*given), theirs(*given), rtol=1e-5, atol=1e-5)


def test_what_else_is_in_the_batch_does_not_change_a_token():
    ours = packed_as(module(qwen3_moe), "torch_linear_per_expert", {})
    x, expert, weight = step(12, 3)
    together = ours(x, expert, weight)
    order = torch.randperm(12)
    torch.testing.assert_close(ours(x[order], expert[order], weight[order]), together[order])
    torch.testing.assert_close(ours(x[5:6], expert[5:6], weight[5:6]), together[5:6])


def test_each_experts_input_is_rounded_with_its_own_scale():
    experts = module(mixtral)
    scales = [0.01 * (index + 1) for index in range(6)]
    inputs = [NVFP4Input(torch.tensor(scale), divides=False) for scale in scales]
    pack = LAYOUTS["torch_linear_per_expert"].pack_experts
    rows = rows_of(experts, "gate_up_proj")
    part = ExpertsPart(pack(unquantized(rows), torch.float32), stack_inputs(inputs))
    ours = PackedExperts(experts, {"gate_up_proj": [part]})
    x = torch.randn(1, HIDDEN)
    unit = torch.ones(1, 1)
    for index in range(6):
        expert = torch.tensor([[index]])
        theirs = module(mixtral)(inputs[index].round(x), expert, unit)
        torch.testing.assert_close(ours(x, expert, unit), theirs, rtol=1e-5, atol=1e-5)
    rounded = {tuple(inputs[index].round(x)[0].tolist()) for index in range(6)}
    assert len(rounded) > 1, "the scales are alike, and nothing was tested"


def test_a_traced_graph_computes_what_the_module_does():
    experts = module(qwen3_moe)
    weights = {
        name: [Int4(32).random(n, k, CPU) for _ in range(count)]
        for name, (count, n, k) in shapes_of(experts).items()
    }
    ours = packed_as(experts, "dequantize_per_expert", weights)
    given = step(9)
    expected = ours(*given)
    torch._dynamo.reset()
    traced = torch.compile(ours, backend="eager", fullgraph=True)
    torch.testing.assert_close(traced(*given), expected)


def test_a_module_that_is_no_experts_is_refused_by_name():
    with pytest.raises(UserError, match="experts of Linear cannot be packed"):
        PackedExperts(nn.Linear(4, 4), {})
