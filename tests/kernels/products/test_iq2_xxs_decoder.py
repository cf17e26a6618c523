"""IQ2_XXS's packing and its decoder's PTX, interpreted; the order that x's columns get for it."""

import pytest
import torch
from scalegate.kernels.hopper import reorder_x
from scalegate.kernels.iq2_xxs import decoder, lookup, one_row, packing
from scalegate.kernels.iq2_xxs.grid import grid
from scalegate.layouts.formats.iq2_xxs import IQ2XXS, IQ2XXSWeight
from scalegate.layouts.packing.iq2_xxs import IQ2_XXS
from scalegate.tests.kernels.ptx.interpreter import execute

CPU = torch.device("cpu")


def packed_tile() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Words [w, r, t, j] and scales [w, r, j] of a tile, and its weights in float64, before the factor."""
    weight = IQ2XXS().random(64, 256, CPU)
    packed = IQ2_XXS.pack(weight, torch.bfloat16).tensors
    words, scales = packed["words"][0, 1].view(4, 8, 4, 2), packed["scales"][0, 1].view(4, 8, 2)
    exact = weight.dequantize(torch.float64)[:, 64:128] / packed["factor"].double()
    return words, scales, exact


def table() -> torch.Tensor:
    """The codebook as `fill_table` leaves it in shared memory, in words."""
    entries = grid(CPU, torch.bfloat16).view(torch.int32).long() & 0xFFFFFFFF
    return entries.repeat(1, lookup.COPIES).flatten()


def pairs(register: torch.Tensor) -> torch.Tensor:
    """The two bf16 numbers of a register, lower first."""
    return (torch.stack((register & 0xFFFF, register >> 16), -1) << 16).int().view(torch.float32).double()


def copies() -> torch.Tensor:
    return (torch.arange(32) % 8 * 16).view(1, 8, 4).expand(4, 8, 4)


@pytest.mark.parametrize("slices", [1, 2, 4])
def test_the_decoder_makes_of_a_word_what_it_stands_for(slices):
    words, scales, exact = packed_tile()
    columns = exact.view(4, 2, 8, 2, 4, 4, 2)  # w, row, r, block, t, pair, h
    both = [scales[..., None, i % 2].expand(4, 8, 4) for i in range(4)]
    for first in range(0, 4, slices):
        arguments = [*(words[..., i % 2] for i in range(4)), *both, *[copies()] * 4]
        found = execute(decoder.decode_asm(first, slices, False), 4 * slices, arguments, table())
        for i in range(slices):
            block, within = divmod(first + i, 2)
            for row in (0, 1):
                for v in (0, 1):
                    wanted = columns[:, row, :, block, :, 2 * within + v]
                    got = pairs(found[4 * i + 2 * row + v])
                    assert torch.allclose(got, wanted, rtol=2**-7), (first, i, row, v)
                    assert torch.equal(got.sign(), wanted.sign())


def test_the_product_of_one_row_decodes_the_same_weights():
    words, scales, exact = packed_tile()
    columns = exact.view(4, 2, 8, 2, 4, 4, 2)
    for which in range(4):
        halves = execute(
            one_row.decode_asm(which), 8, [*(words[..., i % 2] for i in range(4)), *[copies()] * 4], table()
        )
        for row in (0, 1):
            scale = pairs(scales[..., which % 2].long() & 0xFFFFFFFF)[..., row, None, None]
            for pair in range(4):
                got = pairs(halves[4 * (pair // 2) + 2 * (pair % 2) + row]) * scale
                assert torch.allclose(got, columns[:, row, :, which % 2, :, pair], rtol=2**-8)


@pytest.mark.parametrize(("rows", "k_tiles"), [(8, 4), (16, 4), (32, 2), (64, 2), (128, 2)])
def test_the_pairs_of_x_end_where_wgmma_gives_a_lane_its_own_vector(rows, k_tiles):
    columns = 64 * k_tiles
    x = torch.arange(rows * columns // 2).view(rows, columns // 2)  # pairs
    chunk = torch.arange(columns // 8)
    row = torch.arange(rows)[:, None]
    place = chunk // 8 * rows * 8 + row * 8 + (chunk % 8 ^ row % 8)  # of 16 bytes, 128-byte swizzle
    shared = torch.zeros(rows * columns // 2, dtype=torch.int64)
    shared.view(-1, 4)[place] = x.view(rows, -1, 4)
    thread = torch.arange(reorder_x.THREADS.value)
    half = thread // rows
    address = half // 2 * rows * 128 + thread % rows * 128 + (half % 2 * 4 ^ thread % rows % 8) * 16
    for first in range(0, rows * k_tiles * 2, len(thread)):
        execute(reorder_x.transpose_asm(first, rows), 1, [address], shared)
    found = shared.view(-1, 4)[place].view(rows, -1, 4, 4)  # 32 columns: pair number 4 a + b
    assert torch.equal(found, x.view(rows, -1, 4, 4).transpose(2, 3))


def test_packed_weights_unpack_to_themselves_whatever_n_is():
    weight = IQ2XXS().random(37, 768, CPU)
    packed = IQ2_XXS.pack(weight, torch.bfloat16).tensors
    assert packed["words"].shape == (1, 12, 256) and packed["scales"].shape == (1, 12, 64)
    indices, patterns, scales = packing.unpack(packed["words"], packed["scales"], torch.bfloat16)
    assert torch.equal(indices[:37], weight.indices().int())
    assert torch.equal(patterns[:37] & 0x7F, weight.sign_patterns())
    ones = sum(patterns >> i & 1 for i in range(8))
    assert not (ones & 1).any(), "an even number of minus signs"
    exact = (weight.scale.float().unsqueeze(-1) * (weight.block_scales() + 0.5) / 4).flatten(1)
    assert torch.allclose(scales[:37] * packed["factor"], exact, rtol=2**-8) and not scales[37:].any()
    assert isinstance(weight, IQ2XXSWeight)
