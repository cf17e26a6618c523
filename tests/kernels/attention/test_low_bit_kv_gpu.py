"""Low-bit keys and values on the GPU at real heads and ragged lengths, beside attention written out in torch.

The reference quantizes with the formats' own arithmetic, so that what is compared is the kernels alone. Codes
of single tokens are compared by themselves, and attention over those in the pages: a code on the edge of two,
one of a hundred thousand, moves a short context's result by more than kernels may.
"""

import numpy as np
import pytest
import torch
from scalegate.kernels.attention.coded.words import unpack
from scalegate.kernels.attention.kvarn import reference as kvarn
from scalegate.kernels.attention.options import AttentionOptions
from scalegate.kernels.attention.per_token import int4, nvfp4
from scalegate.kernels.attention.per_token.store import TokenPages
from scalegate.kernels.hadamard import rotate_reference
from scalegate.layouts.kv.format import KV_FORMATS
from scalegate.layouts.kv.kvarn.kvarn import KVarN
from scalegate.layouts.kv.layer import KVShape, PoolSize, Workspaces
from scalegate.serving_check.engine.request import SamplingParams
from scalegate.serving_check.engine.scheduler import PrefillChunk
from scalegate.serving_check.engine.sequence import Sequence
from scalegate.serving_check.engine.step_input import StepBuffers

from ...needs_e4m3 import marked

pytestmark = pytest.mark.gpu

MAX_ERROR, EQUAL_CODES = 1e-2, 0.999
LENGTHS = (1, 63, 64, 65, 127, 128, 129, 256, 257, 300, 1000, 2049, 4999, 5000)
CHECKED = 40
"""Last tokens of each prompt whose results are compared."""
GQA_4, GQA_16, ALONE = (32, 8, 128), (16, 1, 64), (2, 2, 256)
LOW_BIT = [name for name in KV_FORMATS if name not in ("unquantized", "fp8", "int8_per_token_head")]
CASES = [(name, GQA_4) for name in LOW_BIT]
CASES += [
    (name, heads) for name in ("kvarn_k4v2_g64", "int4_per_token_head", "nvfp4") for heads in (GQA_16, ALONE)
]


class Layer:
    """One layer and all requests' queries, keys and values, [T, heads, D] by request."""

    def __init__(self, name: str, heads: tuple[int, int, int]):
        query_heads, kv_heads, dim = heads
        self.name, self.dim = name, dim
        self.form = KV_FORMATS[name]
        self.page = self.form.page_size(torch.device("cuda"))
        counts = [-(-length // self.page) for length in LENGTHS]
        order = np.random.default_rng(0).permutation(sum(counts)).astype(np.int32) + 1
        table, used = np.zeros((len(LENGTHS), max(counts)), np.int32), 0
        for row, count in enumerate(counts):
            table[row, :count] = order[used : used + count]
            used += count
        shape = KVShape(kv_heads, dim, dim, torch.bfloat16, query_heads)
        size = PoolSize(sum(counts) + 1, self.page, *table.shape)
        self.layer = self.form.allocate(shape, size, torch.device("cuda"), None, Workspaces())
        self.buffers = StepBuffers(table, self.page, 1 + sum(LENGTHS), torch.device("cuda"), static=True)
        self.table = torch.from_numpy(table).cuda().long()
        self.sequences = [
            Sequence(str(row), [], 0, SamplingParams(), 0, 6000, row=row) for row in range(len(LENGTHS))
        ]
        torch.manual_seed(0)
        uneven = torch.rand(dim, device="cuda") * 3 + 0.2
        self.data = [
            [
                (torch.randn(length, n, dim, device="cuda") * uneven).bfloat16()
                for n in (query_heads, kv_heads, kv_heads)
            ]
            for length in LENGTHS
        ]

    def step(self, counts: list[int], options: AttentionOptions, in_graph: bool = True) -> list[torch.Tensor]:
        """Results by request of as many more tokens of each, [n, H, D].

        in_graph: the kernels are told nothing on the host, as inside a graph; if not, as in a large step
        """
        decode, chunks, parts = [], [], []
        for sequence, count in zip(self.sequences, counts, strict=True):
            start = len(sequence.tokens)
            sequence.tokens += [0] * count
            if count == 1 and start:
                decode.append(sequence)
            elif count:
                chunks.append(PrefillChunk(sequence, start, count))
        batch = [(s.row, len(s.tokens) - 1, 1) for s in decode] + [
            (c.sequence.row, c.start, c.count) for c in chunks
        ]
        for row, start, count in batch:
            parts.append([x[start : start + count] for x in self.data[row]])
        tokens = sum(counts)
        shape = (
            self.buffers.shape(tokens, len(batch), len(batch))
            if chunks
            else self.buffers.decode_shape(tokens)
        )
        host = self.buffers.stage(decode, chunks, shape)
        self.buffers.send(shape, len(batch))
        metadata = self.buffers.input(shape, None if in_graph else host).attention
        out = self.layer.forward(
            *(torch.cat(side) for side in zip(*parts, strict=True)), metadata, options, None
        )
        results, at = [torch.empty(0)] * len(LENGTHS), 0
        for row, _, count in batch:
            results[row] = out[at : at + count]
            at += count
        return results

    @property
    def sides(self) -> tuple[TokenPages, TokenPages]:
        return self.layer.keys, self.layer.values

    def in_pages(self, side: TokenPages, row: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Words and scales [n, H_kv, ...] of a request's first tokens."""
        pages = self.table[row, : -(-length // self.page)]
        words, scales = (
            part.view(torch.uint8)[pages].transpose(1, 2).flatten(0, 1)[:length].contiguous().view(part.dtype)
            for part in (side.words, side.scales)
        )
        return words, scales

    def dequantized(self, words: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        if self.name == "nvfp4":
            ones = torch.ones(words.shape[1], device="cuda")
            return nvfp4.dequantize_reference(nvfp4.NVFP4Tokens(words, scales), ones)
        return int4.dequantize_reference(int4.Int4Tokens(words, scales))

    def quantized(self, x: torch.Tensor) -> torch.Tensor:
        """The reference's words of keys or values [n, H_kv, D]."""
        if self.name == "nvfp4":
            return nvfp4.quantize_reference(x, torch.ones(x.shape[1], device="cuda")).words
        return int4.quantize_reference(rotate_reference(x)).words

    def codes(self, words: torch.Tensor) -> torch.Tensor:
        return nvfp4.unpack(words) if self.name == "nvfp4" else unpack(words, 4)

    @property
    def rotates(self) -> bool:
        """Whether queries meet all that is stored rotated; KVarN's meet so what is coded alone."""
        return self.name == "int4_per_token_head"

    def stored(self, row: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The first `length` tokens as pages give them back, fp32, rotated where all that is stored is."""
        if not isinstance(self.form, KVarN):
            return tuple(self.dequantized(*self.in_pages(side, row, length)) for side in self.sides)
        back = [x[:length].float() for x in self.data[row][1:]]
        whole = length // self.page * self.page
        if whole > self.page:
            read = kvarn.dequantize_reference(self.tiles(row, whole))
            for x, pages in zip(back, read, strict=True):
                x[self.page : whole] = rotate_reference(pages).transpose(1, 2).flatten(0, 1)
        return back[0], back[1]

    def tiles(self, row: int, whole: int) -> kvarn.KVarNTile:
        """KVarN's pages of the first `whole` tokens but for page 0: rows rotated in fp32, then rounded."""
        sides = (
            rotate_reference(x[self.page : whole]).half().unflatten(0, (-1, self.page)).transpose(1, 2)
            for x in self.data[row][1:]
        )
        return kvarn.quantize_reference(*sides, self.form.value_bits)

    def expected(self, row: int, position: int, options: AttentionOptions) -> torch.Tensor:
        """[H, D] of one token."""
        is_kvarn = isinstance(self.form, KVarN)
        key, value = self.stored(row, position // self.page * self.page if is_kvarn else position + 1)
        if is_kvarn:  # its own page is as it came
            own = [x[len(key) : position + 1].float() for x in self.data[row][1:]]
            key, value = torch.cat([key, own[0]]), torch.cat([value, own[1]])
        query = self.data[row][0][position].float()
        query = rotate_reference(query) if self.rotates else query
        groups = query.shape[0] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        scores = torch.einsum("hd,nhd->hn", query, key) * options.scale
        if options.softcap:
            scores = torch.tanh(scores / options.softcap) * options.softcap
        out = torch.einsum("hn,nhd->hd", scores.softmax(-1), value)
        return rotate_reference(out) if self.rotates else out


def relative_error(found: torch.Tensor, want: torch.Tensor) -> float:
    return float((found.float() - want).norm() / want.norm())


@pytest.mark.parametrize("in_graph", [True, False])
@pytest.mark.parametrize("name, heads", [marked(*case) for case in CASES], ids=str)
def test_prompts_in_two_chunks_and_decoding_are_those_of_the_reference(
    name: str, heads: tuple[int, int, int], in_graph: bool
):
    layer, options = Layer(name, heads), AttentionOptions(heads[2] ** -0.5 / 3)
    first = [(length - 1) * 2 // 5 for length in LENGTHS]
    layer.step(first, options, in_graph)
    rest = [length - 1 - done for length, done in zip(LENGTHS, first, strict=True)]
    prompts = layer.step([count if count > 1 else 0 for count in rest], options, in_graph)
    for row, out in enumerate(prompts):
        for back in range(1, min(CHECKED, len(out)) + 1, 13):
            want = layer.expected(row, LENGTHS[row] - 1 - back, options)
            assert relative_error(out[-back], want) < MAX_ERROR, (LENGTHS[row], back)
    for sequence, length in zip(layer.sequences, LENGTHS, strict=True):
        sequence.tokens = [0] * (length - 1)
    decoded = layer.step([1 if length > 3 else 0 for length in LENGTHS], options)
    for row, length in enumerate(LENGTHS):
        if length > 3:
            assert relative_error(decoded[row][0], layer.expected(row, length - 1, options)) < MAX_ERROR, (
                length
            )


@pytest.mark.parametrize(
    "name, heads", [("int4_per_token_head", GQA_4), ("int4_per_token_head", GQA_16), marked("nvfp4", GQA_4)]
)
def test_tokens_hold_the_codes_of_the_reference(name: str, heads: tuple[int, int, int]):
    layer = Layer(name, heads)
    layer.step(list(LENGTHS), AttentionOptions(0.05))
    same = total = 0
    for row, length in enumerate(LENGTHS):
        for side, x in zip(layer.sides, layer.data[row][1:], strict=True):
            found, _ = layer.in_pages(side, row, length)
            codes = [layer.codes(words) for words in (found, layer.quantized(x.float()))]
            same, total = same + int((codes[0] == codes[1]).sum()), total + codes[0].numel()
    assert total > 10**6 and same / total >= EQUAL_CODES


@pytest.mark.parametrize(
    "name, heads",
    [
        ("kvarn_k4v2_g128", GQA_4),
        ("kvarn_k4v4_g64", GQA_4),
        ("kvarn_k4v2_g64", GQA_16),
        ("kvarn_k4v2_g128", ALONE),
    ],
)
def test_pages_hold_the_codes_of_the_reference(name: str, heads: tuple[int, int, int]):
    layer = Layer(name, heads)
    layer.step(list(LENGTHS), AttentionOptions(0.05))
    same = total = 0
    for row, length in enumerate(LENGTHS):
        whole = length // layer.page * layer.page
        if whole <= layer.page:
            continue
        want = layer.tiles(row, whole)
        pages = layer.table[row, 1 : whole // layer.page]
        for part in ("key_words", "value_words"):
            bits = 4 if part == "key_words" else layer.form.value_bits
            codes = [
                unpack(words, bits)
                for words in (getattr(want, part), getattr(layer.layer.storage.pages, part)[pages])
            ]
            same, total = same + int((codes[0] == codes[1]).sum()), total + codes[0].numel()
    assert total > 10**6 and same / total >= EQUAL_CODES
