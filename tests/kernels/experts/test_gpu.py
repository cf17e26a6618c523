"""Grouped products of experts on the GPU: right at a real model's shapes and in graphs."""

import pytest

pytest.importorskip("triton")

import torch
import triton
from scalegate.kernels.experts import gated, int4, one_token, unquantized
from scalegate.kernels.experts.routing import route, route_reference
from scalegate.layouts.formats.fp8 import BLOCKS, FP8
from scalegate.layouts.formats.mxfp4 import MXFP4
from scalegate.layouts.formats.nvfp4 import NVFP4
from scalegate.layouts.packing.all_layouts import LAYOUTS
from scalegate.layouts.packing.routing import Routing
from scalegate.tests.kernels.experts.tunings import CANDIDATES

from ...needs_e4m3 import NEEDS_E4M3

pytestmark = pytest.mark.gpu

MAX_ERROR = 4e-3
EXPERTS, TOP_K = 128, 8
# Qwen3-30B-A3B: gate_up takes rows of tokens, down takes rows of assignments.
PROJECTIONS = {"gate_up": (1536, 2048), "down": (2048, 768)}
TOKENS = (1, 3, 8, 32, 100, 128, 250, 512, 1100)


def chosen(tokens: int, experts: int = EXPERTS, top_k: int = TOP_K) -> torch.Tensor:
    return torch.rand(tokens, experts, device="cuda").topk(top_k).indices


def expected_of(x: torch.Tensor, weight: torch.Tensor, expert: torch.Tensor, bias=None) -> torch.Tensor:
    """y [A, N] in float64."""
    flat = expert.flatten()
    rows = x.repeat_interleave(len(flat) // len(x), 0).double()
    y = torch.empty(len(flat), weight.shape[1], dtype=torch.float64, device="cuda")
    for index in flat.unique().tolist():
        mine = flat == index
        y[mine] = rows[mine] @ weight[index].double().t()
        if bias is not None:
            y[mine] += bias[index].double()
    return y


def poison(count: int, n: int, dtype: torch.dtype) -> None:
    """The next answer's memory."""
    torch.full((count, n), float("nan"), device="cuda", dtype=dtype)


def random_int4(experts: int, n: int, k: int, group_size: int, fractional: bool):
    codes = torch.randint(0, 256, (experts, n, k // 2), dtype=torch.uint8, device="cuda")
    scale = (torch.rand(experts, n, k // group_size, device="cuda") * 0.02 + 0.001).to(torch.bfloat16)
    zero = torch.rand(experts, n, k // group_size, device="cuda") * 15
    return codes, scale, zero if fractional else zero.to(torch.uint8)


def dequantized(codes, scale, zero, group_size: int) -> torch.Tensor:
    values = torch.stack((codes & 0xF, codes >> 4), -1).flatten(2).float()
    scale, zero = (part.float().repeat_interleave(group_size, 2) for part in (scale, zero))
    return (values - zero) * scale


def check(answer: torch.Tensor, expected: torch.Tensor, told: object) -> None:
    assert (answer.double() - expected).norm() <= MAX_ERROR * expected.norm(), told


@pytest.mark.parametrize("tokens", [*TOKENS, 16384])
def test_routing_is_that_of_the_reference(tokens):
    expert = chosen(tokens)
    routing = route(expert, EXPERTS)
    assignments, block_expert = route_reference(expert.cpu(), EXPERTS, routing.block_rows)
    assert torch.equal(routing.block_expert.cpu(), block_expert)
    used = block_expert >= 0
    assert torch.equal(routing.assignments.cpu()[used], assignments[used])


@pytest.mark.parametrize("name", PROJECTIONS)
def test_unquantized_products_are_right_at_every_number_of_tokens(name):
    n, k = PROJECTIONS[name]
    weight = torch.randn(EXPERTS, n, k, device="cuda", dtype=torch.bfloat16)
    for tokens in TOKENS:
        expert = chosen(tokens)
        routing = route(expert, EXPERTS)
        rows = tokens if name == "gate_up" else tokens * TOP_K
        x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
        expected = expected_of(x, weight, expert)
        poison(routing.count, n, x.dtype)
        answer = unquantized.grouped_matmul(x, weight, routing)
        check(answer, expected, tokens)
        assert torch.equal(answer, unquantized.grouped_matmul(x, weight, routing))


@pytest.mark.parametrize("name", PROJECTIONS)
@pytest.mark.parametrize(("group_size", "fractional"), [(128, False), (64, True)])
def test_int4_products_are_right_at_every_number_of_tokens(name, group_size, fractional):
    n, k = PROJECTIONS[name]
    parts = random_int4(EXPERTS, n, k, group_size, fractional)
    weight = dequantized(*parts, group_size)
    words, scale_words = int4.pack(*parts, group_size, torch.bfloat16)
    for tokens in TOKENS:
        expert = chosen(tokens)
        routing = route(expert, EXPERTS)
        rows = tokens if name == "gate_up" else tokens * TOP_K
        x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
        expected = expected_of(x, weight, expert)
        poison(routing.count, n, x.dtype)
        answer = int4.grouped_matmul(x, words, scale_words, routing, n, group_size, fractional)
        check(answer, expected, tokens)
        assert torch.equal(
            answer, int4.grouped_matmul(x, words, scale_words, routing, n, group_size, fractional)
        )


@pytest.mark.parametrize("name", PROJECTIONS)
def test_nvfp4_products_are_right_at_every_number_of_tokens(name):
    (n, k), layout = PROJECTIONS[name], LAYOUTS["grouped_nvfp4"]
    weights = [NVFP4().random(n, k, torch.device("cuda")) for _ in range(EXPERTS)]
    packed = layout.pack_experts(weights, torch.bfloat16)
    weight = torch.stack([expert.dequantize(torch.float32) for expert in weights])
    for tokens in TOKENS:
        expert = chosen(tokens)
        routing = Routing.of(expert, EXPERTS)
        rows = tokens if name == "gate_up" else tokens * TOP_K
        x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
        poison(routing.blocks.count, n, x.dtype)
        answer = layout.grouped_matmul(x, packed, routing)
        check(answer, expected_of(x, weight, expert), tokens)
        assert torch.equal(answer, layout.grouped_matmul(x, packed, routing))


@pytest.mark.parametrize("name", PROJECTIONS)
def test_mxfp4_products_are_right_at_every_number_of_tokens(name):
    (n, k), layout = PROJECTIONS[name], LAYOUTS["grouped_mxfp4"]
    weights = [MXFP4().random(n, k, torch.device("cuda")) for _ in range(EXPERTS)]
    packed = layout.pack_experts(weights, torch.bfloat16)
    weight = torch.stack([expert.dequantize(torch.float32) for expert in weights])
    for tokens in TOKENS:
        expert = chosen(tokens)
        routing = Routing.of(expert, EXPERTS)
        rows = tokens if name == "gate_up" else tokens * TOP_K
        x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
        poison(routing.blocks.count, n, x.dtype)
        answer = layout.grouped_matmul(x, packed, routing)
        check(answer, expected_of(x, weight, expert), tokens)
        assert torch.equal(answer, layout.grouped_matmul(x, packed, routing))


@NEEDS_E4M3
@pytest.mark.parametrize("name", PROJECTIONS)
@pytest.mark.parametrize("spec", [FP8(), FP8(BLOCKS)], ids=lambda spec: spec.key)
def test_fp8_products_are_right_at_every_number_of_tokens(name, spec):
    (n, k), layout = PROJECTIONS[name], LAYOUTS["grouped_fp8"]
    weights = [spec.random(n, k, torch.device("cuda")) for _ in range(EXPERTS)]
    packed = layout.pack_experts(weights, torch.bfloat16)
    weight = torch.stack([expert.dequantize(torch.float32) for expert in weights])
    for tokens in TOKENS:
        expert = chosen(tokens)
        routing = Routing.of(expert, EXPERTS)
        rows = tokens if name == "gate_up" else tokens * TOP_K
        x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
        poison(routing.blocks.count, n, x.dtype)
        answer = layout.grouped_matmul(x, packed, routing)
        check(answer, expected_of(spec.dynamic_input.round(x.float()), weight, expert), tokens)
        assert torch.equal(answer, layout.grouped_matmul(x, packed, routing))


@NEEDS_E4M3
@pytest.mark.parametrize("spec", [FP8(), FP8(BLOCKS)], ids=lambda spec: spec.key)
def test_fp8_keeps_the_bits_of_a_token_among_any_number_of_others(spec):
    (n, k), layout = PROJECTIONS["gate_up"], LAYOUTS["grouped_fp8"]
    weights = [spec.random(n, k, torch.device("cuda")) for _ in range(EXPERTS)]
    packed = layout.pack_experts(weights, torch.bfloat16)
    x, expert = torch.randn(max(TOKENS), k, device="cuda", dtype=torch.bfloat16), chosen(max(TOKENS))

    def product(tokens: int) -> torch.Tensor:
        routing = Routing.of(expert[:tokens], EXPERTS, "per-token")
        return layout.grouped_matmul(x[:tokens], packed, routing)[:TOP_K]

    alone = product(1)
    assert all(torch.equal(alone, product(tokens)) for tokens in TOKENS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("tokens", "bucket"), [(1, 1), (16, 2), (32, 3), (64, 4), (200, 5)])
def test_ragged_biased_and_transposed_weights_are_right_in_every_bucket(tokens, bucket, transposed, dtype):
    """Shapes as gpt_oss has them: no whole tiles of 128."""
    experts, n, k = 8, 1096, 1448
    shape = (experts, k, n) if transposed else (experts, n, k)
    weight = torch.randn(shape, device="cuda").to(dtype)
    weight = weight.transpose(1, 2) if transposed else weight
    bias = torch.randn(experts, n, device="cuda").to(dtype)
    expert = chosen(tokens, experts, 4)
    routing = route(expert, experts)
    assert routing.bucket == bucket
    for rows in (tokens, tokens * 4):
        x = torch.randn(rows, k, device="cuda").to(dtype)
        answer = unquantized.grouped_matmul(x, weight, routing, bias)
        check(answer, expected_of(x, weight, expert, bias), rows)


@pytest.mark.parametrize(
    ("dtype", "fractional"), [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float16, True)]
)
@pytest.mark.parametrize(("group_size", "k"), [(32, 1440), (64, 1472), (128, 1408), (256, 1536)])
def test_every_form_of_an_int4_weight_is_right_in_every_bucket(group_size, k, fractional, dtype):
    experts, n = 8, 1096
    parts = random_int4(experts, n, k, group_size, fractional)
    weight = dequantized(*parts, group_size)
    words, scale_words = int4.pack(*parts, group_size, dtype)
    bias = torch.randn(experts, n, device="cuda").to(dtype)
    for tokens in (1, 4, 30, 80, 150, 300):
        expert = chosen(tokens, experts, 2)
        x = torch.randn(tokens * 2, k, device="cuda").to(dtype)
        routing = route(expert, experts)
        answer = int4.grouped_matmul(x, words, scale_words, routing, n, group_size, fractional, bias)
        check(answer, expected_of(x, weight, expert, bias), tokens)


def test_an_expert_mistaken_for_another_is_seen():
    """Without this the checks above could pass on weights that are all alike."""
    weight = torch.randn(EXPERTS, 256, 256, device="cuda", dtype=torch.bfloat16)
    expert = chosen(16)
    x = torch.randn(16, 256, device="cuda", dtype=torch.bfloat16)
    answer = unquantized.grouped_matmul(x, weight, route((expert + 1) % EXPERTS, EXPERTS))
    with pytest.raises(AssertionError):
        check(answer, expected_of(x, weight, expert), "mistaken")


@pytest.mark.parametrize("tokens", [1, 8, 40, 300])
def test_a_graph_is_right_for_routings_it_was_not_captured_with(tokens):
    n, k = PROJECTIONS["gate_up"]
    dense = torch.randn(EXPERTS, n, k, device="cuda", dtype=torch.bfloat16)
    down = torch.randn(EXPERTS, k, n, device="cuda", dtype=torch.bfloat16)
    parts = random_int4(EXPERTS, n, k, 128, False)
    words, scale_words = int4.pack(*parts, 128, torch.bfloat16)
    expert = chosen(tokens)
    x = torch.randn(tokens, k, device="cuda", dtype=torch.bfloat16)

    def step() -> list[torch.Tensor]:
        routing = route(expert, EXPERTS)
        first = unquantized.grouped_matmul(x, dense, routing)
        return [
            first,
            unquantized.grouped_matmul(first, down, routing),
            int4.grouped_matmul(x, words, scale_words, routing, n, 128, False),
        ]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        answers = step()
    routings = [chosen(tokens) for _ in range(3)]
    routings.append(torch.arange(TOP_K, device="cuda").repeat(tokens, 1))  # all to the same few
    for other in routings:
        expert.copy_(other)
        x.normal_()
        for answer in answers:
            answer.fill_(float("nan"))
        graph.replay()
        check(answers[0], expected_of(x, dense, other), "first")
        check(answers[1], expected_of(answers[0], down, other), "second")
        check(answers[2], expected_of(x, dequantized(*parts, 128), other), "int4")


def one_token_operands(fractional: bool, dtype: torch.dtype, hidden: int, inner: int, group_size: int = 128):
    return [
        one_token.Int4Operand(
            *int4.pack(*random_int4(EXPERTS, n, k, group_size, fractional), group_size, dtype),
            *(n, k, group_size, fractional),
        )
        for n, k in ((2 * inner, hidden), (hidden, inner))
    ]


@pytest.mark.parametrize(
    ("dtype", "fractional"), [(torch.bfloat16, False), (torch.float16, True)], ids=["bf16", "fp16 fractional"]
)
@pytest.mark.parametrize(
    ("hidden", "inner", "group_size"),
    [(2048, 768, 128), (2944, 640, 128), (4608, 1280, 256), (256, 128, 128)],
)
def test_experts_of_one_token_are_right_whichever_and_however_many_it_takes(
    hidden, inner, group_size, fractional, dtype
):
    gate_up, down = one_token_operands(fractional, dtype, hidden, inner, group_size)
    tuned = hidden == 2048
    for top_k in (8, 1, 2, 5, 10) if tuned else (8,):
        x = (torch.randn(1, hidden, device="cuda") + 0.3).to(dtype)
        expert, weight = chosen(1, top_k=top_k), torch.rand(1, top_k, device="cuda").to(dtype)
        given = weight, gate_up, down
        expected = one_token.experts_reference(x, expert, *given).double()
        for tuning in CANDIDATES if tuned and top_k == 8 else (one_token.TUNING,):
            poison(top_k, inner, dtype)
            poison(1, hidden, dtype)
            y = one_token.experts(x, expert, *given, tuning)
            check(y, expected, (top_k, tuning))
            assert torch.equal(y, one_token.experts(x, expert, *given, tuning))
        with pytest.raises(AssertionError):
            check(one_token.experts(x, (expert + 1) % EXPERTS, *given), expected, "other experts")


def test_layers_of_one_token_one_after_another_in_a_graph_wait_for_what_they_read():
    """Each launch begins while the one before it runs: of what that writes, none may be read too early."""
    hidden, inner, layers = 2048, 768, 6
    weights = [one_token_operands(False, torch.bfloat16, hidden, inner) for _ in range(3)]
    router = torch.randn(EXPERTS, hidden, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(1, hidden, device="cuda", dtype=torch.bfloat16)

    def step() -> list[tuple[torch.Tensor, ...]]:
        """Which experts a layer takes depends on the layer before: what each was given, and its answer."""
        state, told = x, []
        for i in range(layers):
            share, expert = (state @ router.t()).float().softmax(-1).topk(TOP_K)
            y = one_token.experts(state, expert, share, *weights[i % 3])
            told.append((state, expert, share, y))
            state = torch.nn.functional.rms_norm(y + state, (hidden,))
        return told

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        told = step()
    for _ in range(20):
        x.normal_()
        graph.replay()
        torch.cuda.synchronize()
        for i, (state, expert, share, answer) in enumerate(told):
            y = one_token.experts(state, expert, share, *weights[i % 3])
            torch.cuda.synchronize()
            assert torch.equal(answer, y)
            check(y, one_token.experts_reference(state, expert, share, *weights[i % 3]).double(), i)


@pytest.mark.parametrize("tokens", [1, 2, 8, 100, 1100])
def test_a_whole_layer_is_the_same_by_both_ways_and_at_every_number_of_tokens(tokens):
    hidden, inner = PROJECTIONS["down"]
    gate_up, down = one_token_operands(False, torch.bfloat16, hidden, inner)
    x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
    expert, weight = chosen(tokens), torch.rand(tokens, TOP_K, device="cuda").bfloat16()
    y = gated.gated_experts(x, expert, weight, gate_up, down)
    for i in {0, tokens // 2, tokens - 1}:
        row = slice(i, i + 1)
        expected = one_token.experts_reference(x[row], expert[row], weight[row], gate_up, down)
        # Grouped products round their outputs and weights once more.
        assert (y[row].double() - expected.double()).norm() <= 2 * MAX_ERROR * expected.double().norm()


@pytest.mark.parametrize("count", [8, 1000])
def test_silu_and_the_sum_over_experts_are_those_of_the_references(count):
    gate_up = torch.randn(count, 1536, device="cuda", dtype=torch.bfloat16) * 4
    expected = gated.silu_and_multiply_reference(gate_up)
    torch.testing.assert_close(gated.silu_and_multiply(gate_up), expected, rtol=1e-2, atol=1e-6)
    rows, share = gate_up[:, :1100].contiguous(), torch.rand(count // 8, 8, device="cuda")
    expected = gated.weighted_sum_reference(rows, share)
    torch.testing.assert_close(gated.weighted_sum(rows, share), expected, rtol=1e-2, atol=1e-5)


def test_nothing_compiles_for_another_number_of_tokens_of_a_bucket():
    weight = torch.randn(EXPERTS, 256, 256, device="cuda", dtype=torch.bfloat16)
    parts = random_int4(EXPERTS, 256, 256, 128, False)
    words, scale_words = int4.pack(*parts, 128, torch.bfloat16)

    def step(tokens: int) -> None:
        routing = route(chosen(tokens), EXPERTS)
        x = torch.randn(tokens, 256, device="cuda", dtype=torch.bfloat16)
        unquantized.grouped_matmul(x, weight, routing)
        int4.grouped_matmul(x, words, scale_words, routing, 256, 128, False)

    compiled = []

    def listen(**told: object) -> None:
        compiled.append(told.get("cache_hit"))

    before = triton.knobs.compilation.listener
    try:
        for tokens in (2, 20, 100, 200, 500, 1000):  # one of each bucket
            step(tokens)
        triton.knobs.compilation.listener = listen
        for tokens in (1, 3, 16, 17, 33, 48, 101, 160, 256, 300, 512, 768, 1024, 2000):
            step(tokens)
    finally:
        triton.knobs.compilation.listener = before
    assert not compiled
