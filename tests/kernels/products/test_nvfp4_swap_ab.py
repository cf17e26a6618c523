"""NVFP4's packing, its torch reference, and its decoder's PTX, the last executed by an interpreter of PTX."""

import pytest
import torch
from scalegate.kernels.experts import nvfp4 as experts
from scalegate.kernels.nvfp4 import decoder, packing
from scalegate.layouts.formats.int4 import pack_nibbles
from scalegate.layouts.formats.nvfp4 import NVFP4, NVFP4Weight
from scalegate.layouts.packing.nvfp4_swap_ab import NVFP4_SWAP_AB, PACKING
from scalegate.tests.kernels.ptx.interpreter import execute

# Whole tiles; ragged N; ragged K, down to one group.
SHAPES = [(64, 64), (128, 192), (65, 80), (200, 416), (7, 16)]


def every_scale(count: int) -> torch.Tensor:
    """All E4M3 numbers but NaN, negative ones and both zeros among them, over and over."""
    numbers = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8)
    return numbers.repeat(-(-count // len(numbers)))[:count].view(torch.float8_e4m3fn)


def random_weight(n: int, k: int) -> NVFP4Weight:
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8)
    scale = every_scale(n * k // 16)[torch.randperm(n * k // 16)].view(n, k // 16)
    return NVFP4Weight(NVFP4(), pack_nibbles(codes), scale, torch.tensor(0.375))


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_what_is_packed_is_the_weight_exactly(n, k):
    weight = random_weight(n, k)
    packed = NVFP4_SWAP_AB.pack(weight, torch.bfloat16)
    got = packing.reference_weight(packed.tensors["words"], packed.tensors["scales"])
    assert torch.equal(got[:n, :k].float() * packed.tensors["factor"], weight.dequantize(torch.float32))
    assert not got[n:].any() and not got[:, k:].any()


def test_the_test_above_sees_another_scale():
    weight = random_weight(64, 64)
    other = (weight.scale.view(torch.uint8) ^ 1).view(torch.float8_e4m3fn)
    packed = NVFP4_SWAP_AB.pack(weight.with_tensors({"scale": other}), torch.bfloat16)
    got = packing.reference_weight(packed.tensors["words"], packed.tensors["scales"])
    wrong = got.float() * packed.tensors["factor"] != weight.dequantize(torch.float32)
    assert wrong.float().mean() > 0.6  # codes of zero stay zero


def test_a_lane_holds_the_weights_that_the_matrix_unit_wants_of_it():
    """One weight that is not zero: row 16 w + 8 u + r, column 16 j + 8 v + 2 t + h."""
    w, u, r, j, v, t, h = 2, 1, 5, 3, 1, 3, 1
    codes = torch.zeros((64, 64), dtype=torch.uint8)
    codes[16 * w + 8 * u + r, 16 * j + 8 * v + 2 * t + h] = 15
    words = packing.pack(codes, torch.ones(64, 4).to(torch.float8_e4m3fn))[0].flatten()
    (place,) = words.nonzero().flatten().tolist()
    assert place == (((w * 8 + r) * 4 + t) * 2 + v) * 2 + u
    bits = {bit for bit in range(32) if int(words[place]) >> bit & 1}
    assert bits == {packing.bit_position(j, h, bit) for bit in range(4)}


def test_codes_and_scales_take_every_bit_of_their_words_once():
    codes = [packing.bit_position(j, h, bit) for j in range(4) for h in range(2) for bit in range(4)]
    scales = [packing.scale_position(i, u, bit) for i in range(2) for u in range(2) for bit in range(8)]
    assert sorted(codes) == sorted(scales) == list(range(32))


def decoded(words: torch.Tensor, scales: torch.Tensor, first: int, slices: int) -> torch.Tensor:
    """The registers that the decoder's PTX makes of one tile: bf16 [w, r, t, v, slice, u, h]."""
    words, scales = words.view(4, 8, 4, 2, 2), scales.view(4, 8, 1, 1, 2)
    of_slices = []
    for j in range(first, first + slices):
        (both,) = execute(decoder.scale_asm(j % 2), 1, [scales[..., j // 2]])
        of_slices += [both, both]
    arguments = [words[..., 0], words[..., 1], *of_slices]
    registers = execute(decoder.decode_asm(first, slices), 2 * slices, arguments)
    halves = [torch.stack((register & 0xFFFF, register >> 16), -1) for register in registers]
    stacked = torch.stack(torch.broadcast_tensors(*halves), -2).unflatten(-2, (slices, 2))
    return (stacked << 16).int().view(torch.float32)


@pytest.mark.parametrize("slices", [1, 2, 4])
def test_the_decoders_instructions_make_the_packed_weight_exactly(slices):
    """Of all codes with all scales, among them those whose products are smallest and greatest."""
    for scale in every_scale(256).view(-1, 4):
        codes = torch.arange(64 * 64).view(64, 64).add(torch.arange(64)[:, None]).remainder(16)
        words, scales = packing.pack(codes.to(torch.uint8), scale.expand(64, 4).contiguous())
        weight = packing.reference_weight(words, scales).float()
        wanted = weight.view(4, 2, 8, 4, 2, 4, 2)  # w, u, r, j, v, t, h
        for first in range(0, 4, slices):
            got = decoded(words[0, 0], scales[0, 0], first, slices)
            part = wanted[:, :, :, first : first + slices].permute(0, 2, 5, 4, 3, 1, 6)
            assert torch.equal(got, part)


def test_only_bf16_is_served_and_the_global_scale_is_the_epilogues():
    assert PACKING.dtypes == (torch.bfloat16,)
    operand = PACKING.operand(NVFP4_SWAP_AB.pack(random_weight(64, 64), torch.bfloat16))
    assert operand.factor is not None and float(operand.factor) == 0.375 * 128


def test_the_experts_decoder_makes_the_same_weights_exactly():
    scale = every_scale(64 * 8).view(64, 8)
    codes = torch.randint(0, 16, (64, 128), dtype=torch.uint8)
    words, scale_words = experts.pack(codes, scale)
    pairs = words.view(64, 8, 2)
    of_rows = [scale_words[i // 2][:, None].expand(64, 8) for i in range(4)]
    wanted = experts.reference_weight(words, scale_words).float()
    for slices in (list(range(8)), [0, 1, 2, 3], [4, 5, 6, 7], [0, 1], [2, 3], [4, 5], [6, 7]):
        asm = experts.unpack_asm(slices)
        registers = execute(asm, len(slices), [pairs[..., 0], pairs[..., 1], *of_rows])
        for j, register in zip(slices, registers, strict=True):
            halves = torch.stack((register & 0xFFFF, register >> 16), -1).flatten(1)
            assert torch.equal((halves << 16).int().view(torch.float32), wanted[:, 16 * j : 16 * j + 16]), j
