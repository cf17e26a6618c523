"""KVarN's tokens kept, pages made of them, pages read back: each kernel by itself; see conftest.py."""

import itertools

import pytest
import torch
from scalegate.kernels.attention.coded.words import unpack
from scalegate.kernels.attention.kvarn import reference as kvarn
from scalegate.kernels.attention.kvarn.flush import addresses, flush_decoded, flush_prompts
from scalegate.kernels.attention.kvarn.held import append_held, hold
from scalegate.kernels.attention.kvarn.reference import KVarNTile
from scalegate.kernels.attention.kvarn.widen import widen_kvarn
from scalegate.kernels.hadamard import rotate_reference
from scalegate.tests.exhaustive import exhaustive_but

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
# The interpreter adds bf16 numbers as integers.
DTYPES = (torch.float32, torch.float16, *([torch.bfloat16] if ON_GPU else []))
HEADS, PAGES, ROWS = 2, 8, 3
SIZES = [(16, 64), (32, 128)] if not ON_GPU else [(32, 64), (64, 64), (64, 128), (128, 128), (128, 256)]
EQUAL_CODES = 0.999


class OneLayer:
    """Empty pages, rows that hold something, and a step's keys and values."""

    def __init__(self, group_size: int, dim: int, dtype: torch.dtype = torch.float16, value_bits: int = 2):
        self.group_size, self.dim, self.value_bits = group_size, dim, value_bits
        self.generator = torch.Generator().manual_seed(0)
        self.uneven = torch.rand(dim, generator=self.generator) * 3 + 0.2
        self.dtype = dtype
        self.held = self.random(ROWS, 2, 2, HEADS, group_size)
        sizes = (group_size, dim // 4), (group_size * value_bits // 4, dim // 4), (3, dim), (3, group_size)
        kinds = torch.int16, torch.int16, torch.float16, torch.float16
        self.pages = KVarNTile(
            *(
                torch.zeros(PAGES, HEADS, *size, dtype=kind, device=DEVICE)
                for size, kind in zip(sizes, kinds, strict=True)
            )
        )

    def random(self, *shape: int) -> torch.Tensor:
        x = torch.randn(*shape, self.dim, generator=self.generator) * self.uneven
        return x.to(DEVICE, self.dtype)

    def key_and_value(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """[tokens, H_kv, D] each, rows of two projections that are not equally wide."""
        _, key, _ = self.random(tokens, 3 * HEADS).split(HEADS, 1)
        _, value = self.random(tokens, 2 * HEADS).split(HEADS, 1)
        assert not key.is_contiguous() and key.stride(0) != value.stride(0)
        return key, value

    def reference(self, key: torch.Tensor, value: torch.Tensor) -> KVarNTile:
        """The tile of raw keys and values [..., G, D]; of fp32 a GPU's matrix units take what fp16 holds."""
        if ON_GPU and self.dtype == torch.float32:
            key, value = key.half(), value.half()
        rotated = (rotate_reference(x).half() for x in (key, value))
        return kvarn.quantize_reference(*rotated, self.value_bits)

    def share_of_equal_codes(self, page: int, want: KVarNTile) -> float:
        same = total = 0
        for name, bits in (("key_words", 4), ("value_words", self.value_bits)):
            found, wanted = (unpack(getattr(tile, name), bits) for tile in (self.pages, want))
            same, total = same + int((found[page] == wanted).sum()), total + wanted.numel()
        return same / total


def integers(*values: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


@pytest.mark.parametrize(
    "dtype, value_bits",
    exhaustive_but(itertools.product(DTYPES, (2, 4)), (torch.float32, 2), (torch.float16, 4)),
    ids=str,
)
@pytest.mark.parametrize("group_size, dim", exhaustive_but(SIZES, SIZES[0]))
def test_a_page_has_the_codes_of_its_rotated_rows_whoever_writes_it(
    group_size: int, dim: int, dtype: torch.dtype, value_bits: int
):
    layer = OneLayer(group_size, dim, dtype, value_bits)
    key, value = layer.key_and_value(3)
    row, page, old = 1, 5, group_size - 3
    # A prompt's last three tokens fill its page 1, whose others are held.
    nobody = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    positions = torch.arange(3, device=DEVICE) + group_size + old
    slots = torch.arange(3, device=DEVICE) + page * group_size + old
    rows = torch.full((3,), row, device=DEVICE)
    flush_prompts(key, value, positions, slots, rows, nobody, layer.held, layer.pages, value_bits)
    full = layer.held[row, 1].clone()
    full[0, :, old:], full[1, :, old:] = key.transpose(0, 1), value.transpose(0, 1)
    assert layer.share_of_equal_codes(page, layer.reference(*full)) >= EQUAL_CODES
    assert not any(part[[0, 1, 2, 3, 4, 6, 7]].any() for part in vars(layer.pages).values())

    # Another request, with the same rows held, has just decoded the first token after its page 1.
    layer.held[2, 1] = full
    table = torch.zeros(1, 3, dtype=torch.int32, device=DEVICE)
    table[0, 1] = 6
    flush_decoded(
        addresses([(layer.pages, layer.held)], DEVICE),
        integers(2 * group_size + 1, dtype=torch.int32),
        integers(2),
        table,
        layer.held,
        integers(-1, -1, -1, dtype=torch.int32),
        value_bits,
    )
    for part in vars(layer.pages).values():
        assert torch.equal(part[6], part[page])


def test_outliers_in_one_channel_are_spread_before_they_are_quantized():
    layer = OneLayer(*SIZES[-1])
    group_size = layer.group_size
    layer.held[..., 7] *= 50
    where = torch.arange(group_size, device=DEVICE)
    key, value = layer.held[0, 1].permute(0, 2, 1, 3)
    nobody = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    rows = torch.zeros(group_size, dtype=torch.int64, device=DEVICE)
    flush_prompts(
        key.contiguous(), value.contiguous(), where + group_size, where + 3 * group_size, rows, nobody,
        layer.held, layer.pages, layer.value_bits,
    )  # fmt: skip
    assert layer.share_of_equal_codes(3, layer.reference(*layer.held[0, 1])) >= EQUAL_CODES


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value_bits", [2, 4])
def test_pages_are_read_back_unrotated(dtype: torch.dtype, value_bits: int):
    layer = OneLayer(*SIZES[0], dtype, value_bits)
    group_size = layer.group_size
    raw = layer.random(2, HEADS, group_size)
    for part, new in zip(vars(layer.pages).values(), vars(layer.reference(*raw)).values(), strict=True):
        part[4] = new
    key, value = layer.key_and_value(12)
    # A chunk of ten tokens, whose first is the step's second, begins within page 2.
    start = 2 * group_size + 6
    spans = [(4, 1, group_size), (-1, 1, 2 * group_size), (-1, 1, 0)]
    spans = torch.tensor([(*span, start, start + 10, 1) for span in spans], dtype=torch.int32, device=DEVICE)
    keys, values = widen_kvarn(spans, key, value, layer.pages, layer.held, value_bits)
    want = kvarn.dequantize_reference(KVarNTile(*(part[4] for part in vars(layer.pages).values())))
    for side, (found, new) in enumerate(((keys, key), (values, value))):
        assert found.dtype == dtype and found.shape == (3, HEADS, group_size, layer.dim)
        back = rotate_reference(want[side])
        precision = 4e-3 if dtype == torch.bfloat16 else 1e-3
        assert float((found[0].float() - back).norm() / back.norm()) < precision
        assert float((back - raw[side].float()).norm() / back.norm()) < 0.5
        assert torch.equal(found[1, :, :6], layer.held[1, 1, side, :, :6])
        assert torch.equal(found[1, :, 6:16], new[1:11].transpose(0, 1))
        assert not found[1, :, 16:].any()
        assert torch.equal(found[2], layer.held[1, 0, side])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tokens_of_decoding_requests_are_kept_as_they_came_and_queries_over_codes_rotated(dtype: torch.dtype):
    layer = OneLayer(*SIZES[0], dtype)
    group_size = layer.group_size
    key, value = layer.key_and_value(6)
    want = layer.held.clone()
    # Two that decode, one that pads the batch, and a prompt.
    positions = integers(3, 4 * group_size + 2, 0, 5, 6, 7)
    lengths = integers(4, 4 * group_size + 3, 0, 0, dtype=torch.int32)
    query = torch.randn(6, 3 * key.shape[1], key.shape[2], device=DEVICE).to(dtype)
    turned_q = torch.full(query.shape, 7.0, dtype=torch.float16, device=DEVICE)
    append_held(query, key, value, positions, integers(2, 0, 1, 1, 1, 1), lengths, layer.held, turned_q)
    for token, (row, which, offset) in enumerate(((2, 0, 3), (0, 1, 2))):
        want[row, which, 0, :, offset], want[row, which, 1, :, offset] = key[token], value[token]
    assert torch.equal(layer.held, want)
    # Only the second has pages of codes.
    assert (turned_q[[0, 2, 3, 4, 5]] == 7).all()
    torch.testing.assert_close(turned_q[1].float(), rotate_reference(query[1]), atol=2e-3, rtol=2e-3)


def test_of_prompts_the_first_page_and_the_last_one_are_kept():
    layer = OneLayer(*SIZES[0])
    group_size = layer.group_size
    lengths = integers(0, 0, dtype=torch.int32)
    written = integers(-1, -1, -1, dtype=torch.int32)
    # One from its beginning over two pages and some tokens, one that ends with its page 3, and padding.
    counts = 2 * group_size + 5, 4
    firsts = 0, 4 * group_size - 4
    positions = torch.cat([torch.arange(c) + f for c, f in zip(counts, firsts, strict=True)])
    positions = torch.cat([positions, torch.zeros(2, dtype=torch.int64)]).to(DEVICE)
    rows = torch.tensor([1] * counts[0] + [0] * counts[1] + [2] * 2, device=DEVICE)
    slots = positions + group_size
    slots[-2:] = -1
    key, value = layer.key_and_value(len(rows))
    want = layer.held.clone()
    hold(key, value, positions, slots, rows, lengths, layer.held, written)
    for side, new in enumerate((key, value)):
        new = new.transpose(0, 1)
        want[1, 0, side] = new[:, :group_size]
        want[1, 1, side, :, :5] = new[:, 2 * group_size : counts[0]]
        want[0, 1, side, :, -4:] = new[:, counts[0] : -2]
    assert torch.equal(layer.held, want)
    assert written.tolist() == [3, -1, -1]
