"""Routing and grouped products of experts, against the references; see conftest.py.

The interpreter has no bf16 product, so products are compared in fp16 there.
"""

import pytest
import torch
from scalegate.kernels.experts import int4, mxfp4, nvfp4, packed, unquantized
from scalegate.kernels.experts.routing import (
    LARGEST_CHUNK,
    buffer_size,
    max_blocks,
    route,
    route_reference,
    routing_in,
)
from scalegate.kernels.experts.tile import INVARIANT_ROWS, block_rows_of
from scalegate.layouts.formats.int4 import unpack_nibbles
from scalegate.layouts.formats.mxfp4 import MXFP4
from scalegate.layouts.packing.all_layouts import LAYOUTS
from scalegate.tests.exhaustive import exhaustive_but
from scalegate.tests.rounding_bounds import rounded, summed

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EXPERTS, TOKENS, TOP_K = 5, 9, 2
N, K = 136, 160


def chosen(tokens: int, top_k: int, experts: int, seed: int = 0) -> torch.Tensor:
    """Distinct random experts for each token."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(tokens, experts, generator=generator).topk(top_k).indices.to(DEVICE)


def check_routing(expert: torch.Tensor, experts: int, block_rows: int | None) -> None:
    routing = route(expert, experts, block_rows)
    assignments, block_expert = route_reference(expert, experts, routing.block_rows)
    assert torch.equal(routing.block_expert, block_expert)
    used = block_expert >= 0
    assert torch.equal(routing.assignments[used], assignments[used])


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts"),
    exhaustive_but([(1, 1, 1), (1, 8, 128), (7, 3, 6), (40, 8, 60), (150, 4, 40)], (1, 1, 1), (40, 8, 60)),
)
@pytest.mark.parametrize("block_rows", [None, 16, 64])
def test_blocks_are_those_of_the_reference(tokens, top_k, experts, block_rows):
    check_routing(chosen(tokens, top_k, experts), experts, block_rows)


def test_one_expert_may_take_every_assignment():
    for index in (0, 3, 7):
        check_routing(torch.full((37, 2), index, device=DEVICE), 8, 16)


def test_more_assignments_than_one_chunk_are_counted():
    expert = chosen(1100, 4, 6)
    assert expert.numel() > LARGEST_CHUNK
    check_routing(expert, 6, 128)


def test_assignments_of_no_expert_are_in_no_block():
    expert = chosen(12, 2, 4)
    expert[3:6] = 4
    expert[8] = -1
    check_routing(expert, 4, 16)
    routing = route(expert, 4, 16)
    used = routing.assignments[routing.block_expert >= 0]
    assert (used < routing.count).sum() == 16


def test_the_bound_on_blocks_is_reached_and_never_passed():
    for count in range(1, 60):
        for experts in (1, 3, 8):
            used = min(count, experts)
            # All experts but one take one assignment, or as near to that as blocks of 16 fill.
            counts = torch.ones(used, dtype=torch.int64)
            counts[0] += count - used
            assert int(((counts + 15) // 16).sum()) == max_blocks(count, experts, 16)
            random = torch.bincount(torch.randint(0, experts, (count,)), minlength=experts)
            assert int(((random + 15) // 16).sum()) <= max_blocks(count, experts, 16)


def test_where_bits_are_kept_every_block_is_multiplied_in_the_same_order():
    """Eight rows take another instruction, and packed weights two sums of K."""
    for experts in (4, 128):
        counts = [1, 2, *range(8, 4000, 97)]
        tuned, kept = ([block_rows_of(count, experts, on) for count in counts] for on in (False, True))
        assert min(tuned) == packed.TWO_CHAINS_TO < min(kept) == INVARIANT_ROWS
        assert [rows for rows in tuned if rows >= INVARIANT_ROWS] == kept[-sum(r >= 16 for r in tuned) :]


def relative(answer: torch.Tensor, expected: torch.Tensor) -> float:
    return float((answer.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("biased", exhaustive_but([False, True], True))
def test_the_unquantized_product_is_right_by_token_and_by_assignment(transposed: bool, biased: bool):
    torch.manual_seed(1)
    expert = chosen(TOKENS, TOP_K, EXPERTS)
    weight = torch.randn(EXPERTS, K, N) if transposed else torch.randn(EXPERTS, N, K)
    weight = weight.half().to(DEVICE)
    weight = weight.transpose(1, 2) if transposed else weight
    bias = torch.randn(EXPERTS, N).half().to(DEVICE) if biased else None
    routing = route(expert, EXPERTS)
    for rows in (TOKENS, TOKENS * TOP_K):
        x = torch.randn(rows, K).half().to(DEVICE)
        expected = unquantized.grouped_matmul_reference(x, weight, expert, bias)
        answer = unquantized.grouped_matmul(x, weight, routing, bias)
        assert relative(answer, expected) < rounded(torch.float16) + summed(K)
        # The check sees an expert mistaken for another.
        mistaken = unquantized.grouped_matmul(x, weight, route((expert + 1) % EXPERTS, EXPERTS), bias)
        assert relative(mistaken, expected) > 0.5


def test_larger_blocks_take_the_same_assignments():
    torch.manual_seed(2)
    expert = chosen(40, 1, 2)
    weight, x = torch.randn(2, 64, 64).half().to(DEVICE), torch.randn(40, 64).half().to(DEVICE)
    expected = unquantized.grouped_matmul_reference(x, weight, expert)
    for block_rows in (16, 32, 64):
        answer = unquantized.grouped_matmul(x, weight, route(expert, 2, block_rows))
        assert relative(answer, expected) < rounded(torch.float16) + summed(64)


def test_a_weight_with_neither_dimension_contiguous_is_refused():
    weight = torch.zeros(2, 64, 64, dtype=torch.float16, device=DEVICE)[:, ::2, ::2]
    with pytest.raises(ValueError, match="contiguous"):
        unquantized.grouped_matmul(weight[0], weight, route(chosen(32, 1, 2), 2))


def random_int4(n: int, k: int, group_size: int, fractional: bool) -> tuple[torch.Tensor, ...]:
    codes = torch.randint(0, 256, (EXPERTS, n, k // 2), dtype=torch.uint8)
    scale = torch.rand(EXPERTS, n, k // group_size) * 0.02 + 0.001
    zero = torch.rand(EXPERTS, n, k // group_size) * 15
    parts = codes, scale, zero if fractional else zero.to(torch.uint8)
    return tuple(part.to(DEVICE) for part in parts)


def dequantized(codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, group_size: int):
    values = torch.stack((codes & 0xF, codes >> 4), -1).flatten(2).float()
    scale, zero = (part.float().repeat_interleave(group_size, 2) for part in (scale, zero))
    return (values - zero) * scale


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("fractional", [False, True])
@pytest.mark.parametrize(("group_size", "k"), [(32, 160), (64, 192), (128, 256), (256, 512)])
def test_a_packed_weight_is_the_dequantized_one(group_size, k, fractional, dtype):
    torch.manual_seed(3)
    parts = random_int4(70, k, group_size, fractional)
    words, scale_words = int4.pack(*parts, group_size, dtype)
    weight = int4.reference_weight(words, scale_words, 70, group_size, fractional, dtype)[..., :k]
    expected = dequantized(*parts, group_size)
    assert relative(weight, expected) < (3e-3 if dtype == torch.bfloat16 else 4e-4)
    if not fractional:
        assert not weight[expected == 0].any()


@pytest.mark.parametrize(
    ("group_size", "k", "fractional", "biased"),
    [(128, 256, False, True), (64, 192, False, False), (32, 160, True, True), (256, 512, True, False)],
)
def test_the_int4_product_is_that_of_the_dequantized_weight(group_size, k, fractional, biased):
    torch.manual_seed(4)
    expert = chosen(TOKENS, TOP_K, EXPERTS)
    parts = random_int4(N, k, group_size, fractional)
    words, scale_words = int4.pack(*parts, group_size, torch.float16)
    bias = torch.randn(EXPERTS, N).half().to(DEVICE) if biased else None
    routing = route(expert, EXPERTS)
    for rows in (TOKENS, TOKENS * TOP_K):
        x = torch.randn(rows, k).half().to(DEVICE)
        expected = unquantized.grouped_matmul_reference(x, dequantized(*parts, group_size), expert, bias)
        answer = int4.grouped_matmul(x, words, scale_words, routing, N, group_size, fractional, bias)
        # Scale and zero are rounded, each weight, and y.
        assert relative(answer, expected) < rounded(torch.float16, times=4) + summed(k)


def random_nvfp4(n: int, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scales, and what they stand for but for their global scale, fp32."""
    codes = torch.randint(0, 16, (EXPERTS, n, k), dtype=torch.uint8)
    scale = (torch.rand(EXPERTS, n, k // 16) * 8 - 1).to(torch.float8_e4m3fn)
    table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    weight = torch.cat((table, -table))[codes.long()] * scale.float().repeat_interleave(16, 2)
    return codes.to(DEVICE), scale.to(DEVICE), weight.to(DEVICE)


@pytest.mark.parametrize("k", [128, 160, 400])
def test_a_packed_nvfp4_weight_is_the_dequantized_one_exactly(k):
    codes, scale, weight = random_nvfp4(70, k)
    for index in range(EXPERTS):
        got = nvfp4.reference_weight(*nvfp4.pack(codes[index], scale[index]))
        assert torch.equal(got[:70, :k].float() * 128, weight[index])
        assert not got[70:].any() and not got[:, k:].any()


@pytest.mark.parametrize(("k", "biased"), exhaustive_but([(256, True), (160, False)], (160, False)))
def test_the_nvfp4_product_is_that_of_the_dequantized_weight(k, biased):
    torch.manual_seed(5)
    expert = chosen(TOKENS, TOP_K, EXPERTS)
    codes, scale, weight = random_nvfp4(N, k)
    words, scale_words = (
        torch.stack(column)
        for column in zip(*(nvfp4.pack(codes[i], scale[i]) for i in range(EXPERTS)), strict=True)
    )
    globals_ = torch.rand(EXPERTS, device=DEVICE) * 0.01 + 0.001
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float16
    bias = torch.randn(EXPERTS, N).to(dtype).to(DEVICE) if biased else None
    routing = route(expert, EXPERTS)
    weight = weight * globals_[:, None, None]
    for rows in (TOKENS, TOKENS * TOP_K):
        x = torch.randn(rows, k).to(dtype).to(DEVICE)
        expected = unquantized.grouped_matmul_reference(x, weight, expert, bias)
        decoder = nvfp4.NVFP4Experts(dtype == torch.float16)
        answer = packed.grouped_matmul(x, words, scale_words, globals_ * 128, routing, N, decoder, bias)
        assert relative(answer, expected) < rounded(dtype) + summed(k)


@pytest.mark.parametrize("k", [128, 160, 416])
def test_a_packed_mxfp4_weight_is_the_dequantized_one_exactly(k):
    weight = MXFP4().random(70, k, torch.device(DEVICE))
    weight.scale[3], weight.scale[5] = 0, 250  # next to the ends of float32
    words, scale_words, factor = mxfp4.pack(unpack_nibbles(weight.codes), weight.scale)
    got = mxfp4.reference_weight(words, scale_words)[:70, :k].double() * factor.double()
    expected = weight.dequantize(torch.float64)
    assert torch.equal(got[torch.arange(70) != 3], expected[torch.arange(70) != 3])
    assert bool((got[3] - expected[3]).abs().max() <= 2.0**-130 * expected.abs().max())
    whole = mxfp4.reference_weight(words, scale_words)
    assert not whole[70:].any() and not whole[:, k:].any()


@pytest.mark.parametrize(("k", "biased"), [(256, True), (160, False)])
def test_the_mxfp4_product_is_that_of_the_dequantized_weight(k, biased):
    torch.manual_seed(6)
    expert = chosen(TOKENS, TOP_K, EXPERTS)
    weights = [MXFP4().random(N, k, torch.device(DEVICE)) for _ in range(EXPERTS)]
    tensors = LAYOUTS["grouped_mxfp4"].pack_experts(weights, torch.bfloat16).tensors
    dense = torch.stack([weight.dequantize(torch.float32) for weight in weights])
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float16
    bias = torch.randn(EXPERTS, N).to(dtype).to(DEVICE) if biased else None
    decoder, routing = mxfp4.MXFP4Experts(dtype == torch.float16), route(expert, EXPERTS)
    for rows in (TOKENS, TOKENS * TOP_K):
        x = torch.randn(rows, k).to(dtype).to(DEVICE)
        expected = unquantized.grouped_matmul_reference(x, dense, expert, bias)
        answer = packed.grouped_matmul(x, *tensors.values(), routing, N, decoder, bias)
        assert relative(answer, expected) < rounded(dtype) + summed(k)


def test_a_group_size_the_kernel_does_not_know_is_refused():
    with pytest.raises(ValueError, match="groups of 48"):
        int4.pack(*random_int4(64, 96, 48, False), 48, torch.float16)


def test_blocks_fit_a_buffer_whose_size_no_bucket_decides():
    for experts in (1, 4, 8, 60, 128, 256):
        for count in [
            *range(1, 200),
            *(1 << power for power in range(8, 18)),
            *range(experts, 60 * experts, 7),
        ]:
            buffer = torch.empty(buffer_size(count, experts), dtype=torch.int32)
            for keeps_bits in (False, True):
                routing = routing_in(buffer, count, experts, block_rows_of(count, experts, keeps_bits))
                assert routing.block_expert.shape == (routing.blocks,), (count, experts)


def test_the_unquantized_product_is_exact_in_float32():
    torch.manual_seed(2)
    expert = chosen(TOKENS, TOP_K, EXPERTS)
    weight, x = torch.randn(EXPERTS, N, K, device=DEVICE), torch.randn(TOKENS, K, device=DEVICE)
    y = unquantized.grouped_matmul(x, weight, route(expert, EXPERTS))
    assert relative(y, unquantized.grouped_matmul_reference(x, weight, expert)) < summed(K)
