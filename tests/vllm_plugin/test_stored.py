"""vLLM's tensors of a layer become the weight that the checkpoint means, in each of its conventions."""

import torch
from scalegate.layouts.formats.int4 import Int4
from scalegate.layouts.formats.int8 import WHOLE_ROW, Int8
from scalegate.vllm_plugin.stored import int4_weight, int8_weight, nvfp4_weight

N, K, GROUP = 24, 128, 32


def words_of(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Numbers [rows, columns] to int32 [rows, columns * bits / 32], the first one in the lowest bits."""
    per_word = 32 // bits
    words = torch.zeros(len(numbers), numbers.shape[1] // per_word, dtype=torch.int64)
    for place in range(per_word):
        words |= numbers[:, place::per_word].long() << (bits * place)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def drawn(low: int, high: int, *shape: int) -> torch.Tensor:
    return torch.randint(low, high, shape)


def scales() -> torch.Tensor:
    return torch.rand(N, K // GROUP).add(0.5).to(torch.bfloat16)


def meant(codes: torch.Tensor, zero: torch.Tensor | int, scale: torch.Tensor) -> torch.Tensor:
    spread = codes.shape[1] // scale.shape[1]
    if isinstance(zero, torch.Tensor):
        zero = zero.double().repeat_interleave(spread, 1)
    return (codes.double() - zero) * scale.double().repeat_interleave(spread, 1)


def test_symmetric_int4():
    codes, scale = drawn(0, 16, N, K), scales()
    weight = int4_weight(Int4(GROUP, symmetric=True), words_of(codes, 4), scale, None)
    assert torch.equal(weight.dequantize(torch.float64), meant(codes, 8, scale))


def test_int4_with_zero_points_packed_along_n():
    codes, zero, scale = drawn(0, 16, N, K), drawn(0, 16, N, K // GROUP), scales()
    zeros = words_of(zero.t(), 4).t()
    assert zeros.shape == (N // 8, K // GROUP)
    weight = int4_weight(Int4(GROUP), words_of(codes, 4), scale, zeros)
    assert torch.equal(weight.dequantize(torch.float64), meant(codes, zero, scale))


def test_what_was_transposed_is_taken_as_it_lies():
    """GPTQ stores [K, N], which vLLM transposes without a copy."""
    codes, scale = drawn(0, 16, N, K), scales()
    stored = words_of(codes, 4).t().contiguous().t()
    assert not stored.is_contiguous()
    weight = int4_weight(Int4(GROUP, symmetric=True), stored, scale.t().contiguous().t(), None)
    assert torch.equal(weight.dequantize(torch.float64), meant(codes, 8, scale))


def test_int8_by_groups_and_by_rows():
    codes = drawn(-128, 128, N, K)
    for spec, scale in ((Int8(GROUP), scales()), (Int8(WHOLE_ROW), scales()[:, :1])):
        weight = int8_weight(spec, words_of(codes + 128, 8), scale)
        assert torch.equal(weight.dequantize(torch.float64), meant(codes, 0, scale))


def test_nvfp4():
    codes = drawn(0, 256, N, K // 2).to(torch.uint8)
    scale = torch.rand(N, K // 16).add(0.5).to(torch.float8_e4m3fn)
    weight = nvfp4_weight(codes, scale, torch.tensor([0.25]))
    twice = nvfp4_weight(codes, scale, torch.tensor([0.5]))
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    first = values[(codes[:, 0] & 7).long()] * torch.where(codes[:, 0] & 8 > 0, -1.0, 1.0)
    expected = first * scale[:, 0].float() * 0.25
    assert torch.equal(weight.dequantize(torch.float32)[:, 0], expected)
    assert torch.equal(twice.dequantize(torch.float32), 2 * weight.dequantize(torch.float32))
