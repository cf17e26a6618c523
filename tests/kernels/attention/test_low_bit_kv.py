"""What the low-bit KV formats' codes mean, against arithmetic written out another way."""

import pytest
import torch
from scalegate.kernels.attention.coded.softmax import programs_of_splits
from scalegate.kernels.attention.coded.words import pack, unpack
from scalegate.kernels.attention.kvarn import int8_page as kvarn_int8_page
from scalegate.kernels.attention.kvarn import reference as kvarn
from scalegate.kernels.attention.per_token import int4, nvfp4
from scalegate.kernels.hadamard import rotate_reference
from scalegate.tests.kernels.ptx.interpreter import execute


def uneven(*shape: int) -> torch.Tensor:
    """Tiles whose channels and tokens differ in size, and in mean."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator) + torch.randn(shape[-1], generator=generator)
    x *= torch.rand(shape[-1], generator=generator).add(0.1) * 4
    return x * torch.rand(shape[-2], 1, generator=generator).add(0.2)


@pytest.mark.parametrize("bits", [2, 4])
def test_words_give_back_every_code(bits: int):
    fields = 16 // bits
    codes = torch.randint(0, 1 << bits, (3, fields, 5), dtype=torch.uint8)
    words = pack(codes)
    assert words.shape == (3, 5) and torch.equal(unpack(words, bits), codes.short())
    assert int(words[0, 0]) & ((1 << bits) - 1) == int(codes[0, 0, 0])


def test_words_of_nvfp4_give_back_every_code():
    codes = torch.arange(16, dtype=torch.int32).repeat(2, 16)[:, torch.randperm(256)]
    words = nvfp4.pack(codes)
    assert words.shape == (2, 64) and torch.equal(nvfp4.unpack(words), codes)
    # Word 26 is of s = 1, h = 1, c = 1, l = 0: of the second quarter, four slices of sixteen channels.
    alone = torch.zeros(1, 256, dtype=torch.int32)
    alone[0, 64 + 4 + 2 : 128 : 16] = 15
    assert nvfp4.pack(alone).nonzero().tolist() == [[0, 26]] and int(nvfp4.pack(alone)[0, 26]) == -1


def of_bytes(x: torch.Tensor) -> torch.Tensor:
    """int64 registers [N] of four bytes → int8 [4N]."""
    return x.to(torch.uint32).view(torch.int8)


def registers(x: torch.Tensor) -> torch.Tensor:
    """The reverse; or of int16."""
    return x.view(torch.uint32).long()


@pytest.mark.parametrize("bits", [2, 4])
def test_bytes_for_integer_products_are_codes_of_words(bits: int):
    half, highest = 1 << (bits - 1), 8 // bits - 1
    words = torch.randint(-(1 << 15), 1 << 15, (64,), dtype=torch.int16)
    pairs = registers(words).view(-1, 2)
    for field, codes in enumerate(unpack(words, bits).unbind(-2)):
        in_byte = field % (8 // bits)
        want = (codes - half if in_byte == highest else codes) << in_byte * bits
        (found,) = execute(kvarn_int8_page._of_words_asm(field, bits), 1, [pairs[:, 0], pairs[:, 1]])
        assert torch.equal(of_bytes(found), want.to(torch.int8))
        if bits == 4 and field < 2:
            (found,) = execute(kvarn_int8_page._nibbles_asm(field), 1, [registers(words)])
            assert torch.equal(of_bytes(found)[::2], want.to(torch.int8))


def test_a_number_is_its_high_and_its_low_byte():
    numbers = torch.arange(-32640, 32640, dtype=torch.int32)
    bits = (numbers + 1.5 * 2.0**23).float().view(torch.int32)
    plain, rounded = (registers(x).view(-1, 4).unbind(-1) for x in (bits, bits + kvarn_int8_page.ROUND.value))
    for_high, for_low = torch.tensor(0x51), torch.tensor(0x40)
    query = (
        execute(kvarn_int8_page.QUERY_ASM.value, 1, [*rounded, for_high])[0],
        execute(kvarn_int8_page.QUERY_ASM.value, 1, [*plain, for_low])[0],
    )
    for high, low in (query, execute(kvarn_int8_page.PROBABILITY_ASM.value, 2, list(rounded))):
        assert torch.equal(256 * of_bytes(high).int() + of_bytes(low).int(), numbers)


@pytest.mark.parametrize("contexts, programs", [(64, 64), (256, 16), (768, 4), (1000, 4), (10**6, 1)])
def test_programs_share_splits_evenly(contexts: int, programs: int):
    assert programs_of_splits(64, contexts) == programs and 64 % programs == 0
    assert programs_of_splits(2, contexts) == min(programs, 2)


def test_the_rotation_keeps_products_and_undoes_itself():
    x, y = uneven(5, 64), uneven(5, 64)
    torch.testing.assert_close(rotate_reference(rotate_reference(x)), x, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(rotate_reference(x) @ rotate_reference(y).T, x @ y.T, atol=1e-3, rtol=1e-4)
    outlier = torch.zeros(64)
    outlier[5] = 8.0
    assert rotate_reference(outlier).abs().max() == 1.0


def test_normalizing_evens_out_rows_and_columns():
    tile = 20 * uneven(2, 32, 64)
    rows, columns = kvarn.normalize_reference(tile)
    scaled = tile / rows[..., None] / columns[..., None, :]

    def imbalance(x: torch.Tensor) -> torch.Tensor:
        return sum(x.std(dim).amax(-1) / x.std(dim).amin(-1) for dim in (-1, -2))

    assert bool((imbalance(scaled) < 0.6 * imbalance(tile)).all())


def test_a_tile_that_is_even_as_it_came_stays_so():
    even = torch.tensor([[1.0, -1.0], [-1.0, 1.0]]).repeat(4, 4)
    assert all(len(scale.unique()) == 1 for scale in kvarn.normalize_reference(even))


@pytest.mark.parametrize("value_bits", [2, 4])
@pytest.mark.parametrize("group, dim", [(64, 128), (128, 64)])
def test_a_tile_is_the_nearest_codes_of_its_rows(value_bits: int, group: int, dim: int):
    key, value = uneven(2, group, dim), uneven(2, group, dim)
    tile = kvarn.quantize_reference(key, value, value_bits)
    bits = 8 * sum(part.nbytes for part in vars(tile).values()) / key.numel()
    assert bits == 4 + value_bits + 16 * 3 * (group + dim) / (group * dim)
    back = kvarn.dequantize_reference(tile)
    channels, tokens = tile.channels.float(), tile.tokens.float()
    key_step = channels[:, 0, None, :] * tokens[:, 0, :, None]
    value_step = tokens[:, 1, :, None] * channels[:, 2, None, :]
    for found, given, step in zip(back, (key, value), (key_step, value_step), strict=True):
        assert float(((found - given).abs() / step).max()) < 0.51 + 0.02
    assert float((back[0] - key).norm() / key.norm()) < 0.1


def test_small_channels_keep_their_precision():
    value = uneven(4, 128, 64) * torch.linspace(2, 80, 64)
    normalized = kvarn.dequantize_reference(kvarn.quantize_reference(value, value, 4))[1]
    low, high = value.amin(-1, keepdim=True), value.amax(-1, keepdim=True)
    plain = ((value - low) / (high - low) * 15).round() / 15 * (high - low) + low

    def by_channel(found: torch.Tensor) -> torch.Tensor:
        return (found - value).norm(dim=1) / value.norm(dim=1)

    assert by_channel(normalized).max() < 0.5 * by_channel(plain).max()


def test_constant_tiles_and_tokens_come_back_as_they_were():
    ones = torch.full((1, 64, 64), 3.0)
    for back in kvarn.dequantize_reference(kvarn.quantize_reference(ones, -ones, 2)):
        torch.testing.assert_close(back.abs(), ones, atol=2e-3, rtol=0)
    assert torch.equal(int4.dequantize_reference(int4.quantize_reference(ones)), ones)
    zeros = torch.zeros(2, 1, 64)
    assert not nvfp4.dequantize_reference(nvfp4.quantize_reference(zeros, torch.ones(1)), torch.ones(1)).any()


def test_int4_is_within_half_a_step():
    x = uneven(7, 2, 64)
    stored = int4.quantize_reference(x)
    step = stored.scales[..., :1].float()
    assert float(((int4.dequantize_reference(stored) - x).abs() / step).max()) < 0.52


def test_nvfp4_holds_every_e2m1_value_and_rounds_to_the_nearest():
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    x = torch.cat([values, -values]).repeat(4).view(1, 1, 64) * 0.25
    by = torch.tensor([0.5])
    stored = nvfp4.quantize_reference(x, by)
    assert torch.equal(nvfp4.dequantize_reference(stored, by), x)
    near = x + torch.tensor([0.05, -0.05]).repeat(32) * 0.25
    rounded = nvfp4.dequantize_reference(nvfp4.quantize_reference(near, by), by)
    assert torch.equal(rounded[x.abs() < 1], x[x.abs() < 1])


def test_nvfp4_takes_four_as_a_groups_largest_where_that_leaves_less_error():
    x = torch.tensor([1.0, 0.75, -0.75, 0.5]).repeat(16).view(1, 1, 64)
    by = torch.tensor([1.0])
    assert torch.equal(nvfp4.dequantize_reference(nvfp4.quantize_reference(x, by), by), x)  # 6 makes 0.75 4.5
