"""KVarN's CPU kernels beside the torch reference: attention over pages and rows, pages coded and read."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from numba import njit
from scalegate.kernels.attention.coded.words import unpack
from scalegate.kernels.attention.kvarn import reference as kvarn
from scalegate.kernels.attention.kvarn.cpu import compiled as kvarn_cpu
from scalegate.kernels.attention.kvarn.cpu import lanes
from scalegate.kernels.attention.kvarn.cpu import tile as kvarn_tile_cpu
from scalegate.kernels.attention.kvarn.cpu.compiled import kernels, numbers
from scalegate.kernels.attention.kvarn.reference import KVarNTile
from scalegate.kernels.hadamard import rotate_reference
from scalegate.tests.exhaustive import exhaustive_but
from scalegate.tests.kernels.attention.kvarn_contexts import Contexts, contexts_of, hold
from scalegate.tests.rounding_bounds import rounded, summed

pytestmark = pytest.mark.long

OF_SCORES = 16 * summed(256)
"""Scores, which reach 16, are sums of up to 256 products; what they are off by, their exponentials are."""
MAX_ERROR = {torch.float32: OF_SCORES}
MAX_ERROR |= {dtype: rounded(dtype) + OF_SCORES for dtype in (torch.bfloat16, torch.float16)}
CASES = [
    ((4, 2, 64), 2, torch.bfloat16, 128),
    ((3, 3, 64), 4, torch.float32, 64),
    ((16, 1, 128), 2, torch.float32, 64),
    ((6, 2, 256), 4, torch.bfloat16, 64),
    ((4, 2, 16), 4, torch.float32, 8),
    ((4, 1, 64), 2, torch.float16, 64),
    ((2, 1, 32), 2, torch.float32, 8),
]
# Kernels for each dtype take a quarter of a minute to compile; how the others are rounded is tested below.
FLOAT32 = [case for case in CASES if case[2] == torch.float32]


def ragged(group: int) -> list[int]:
    return [1, group - 1, group, group + 1, 2 * group, 2 * group + 1, 3 * group, 5 * group + 3]


def pages_of(contexts: Contexts) -> list[np.ndarray]:
    return [numbers(part) for part in vars(contexts.pages).values()]


def decoded(contexts: Contexts, lengths: list[int], softcap: float = 0.0, sinks=None) -> torch.Tensor:
    """[B, H, D] of each context's last token, which is in no row yet."""
    query, key, value = (
        torch.stack([x[-1] for x in side]) for side in (contexts.queries, contexts.keys, contexts.values)
    )
    for row, length in zip(contexts.rows.tolist(), lengths, strict=True):
        page, offset = divmod(length - 1, contexts.group_size)
        contexts.held[row, min(page, 1), :, :, offset:] = torch.nan
    batch, kv_heads, dim = key.shape
    out = torch.full_like(query, torch.nan)
    kernels(query.dtype).decode(
        *map(numbers, (query, key, value, out, contexts.held)), *pages_of(contexts),
        contexts.table.numpy(), contexts.rows.numpy(), np.arange(batch + 1), np.array(lengths),
        0, batch * kv_heads, dim**-0.5, softcap, np.empty(0, np.float32) if sinks is None else sinks.numpy(),
    )  # fmt: skip
    return out


@pytest.mark.parametrize("softcap, sinks", [(0.0, None), (2.0, torch.linspace(-2, 3, 16))])
@pytest.mark.parametrize("heads, bits, dtype, group", exhaustive_but(CASES, *FLOAT32), ids=str)
def test_decoding_at_ragged_lengths(heads, bits, dtype, group, softcap, sinks):
    lengths, query_heads, dim = ragged(group), heads[0], heads[2]
    sinks = None if sinks is None else sinks[:query_heads].clone()
    contexts = contexts_of(lengths, heads, bits, dtype, group)
    out = decoded(contexts, lengths, softcap, sinks)
    for request, length in enumerate(lengths):
        want = contexts.expected(request, length - 1, dim**-0.5, softcap, sinks)
        error = (out[request].float() - want).norm() / want.norm()
        assert error < MAX_ERROR[dtype], (length, float(error))


def test_a_token_is_held_where_it_belongs_and_its_bits_are_those_alone():
    heads, lengths = (4, 2, 64), ragged(64)
    contexts = contexts_of(lengths, heads, 2, torch.float32, 64)
    want = contexts.held.clone()
    together = decoded(contexts, lengths)
    for request, length in enumerate(lengths):
        row, (page, offset) = int(contexts.rows[request]), divmod(length - 1, 64)
        hold(want[row], contexts.keys[request], contexts.values[request], length)
        at = (row, min(page, 1), slice(None), slice(None), offset)
        assert torch.equal(contexts.held[at], want[at])
        itself = slice(request, request + 1)
        alone = Contexts(
            contexts.queries[itself], contexts.keys[itself], contexts.values[itself], [],
            contexts.pages, contexts.held, contexts.table[itself], contexts.rows[itself], 64,
        )  # fmt: skip
        assert torch.equal(decoded(alone, lengths[itself])[0], together[request])


def uneven(group: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Keys and values [2, G, 3, D] whose channels and tokens differ in size, and in mean."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, group, 3, dim, generator=generator) * torch.rand(dim, generator=generator).add(0.1)
    x *= torch.rand(group, 1, 1, generator=generator).add(0.2)
    return (x + torch.randn(dim, generator=generator)).to(dtype)


def empty_pages(group: int, dim: int, bits: int) -> KVarNTile:
    words, scales = torch.int16, torch.float16
    return KVarNTile(
        torch.zeros(2, 3, group, dim // 4, dtype=words),
        torch.zeros(2, 3, group * bits // 4, dim // 4, dtype=words),
        torch.zeros(2, 3, 3, dim, dtype=scales),
        torch.zeros(2, 3, 3, group, dtype=scales),
    )


@pytest.mark.parametrize("by_token", [True, False])
@pytest.mark.parametrize("heads, bits, dtype, group", exhaustive_but(CASES, *FLOAT32), ids=str)
def test_pages_are_coded_and_read_as_the_reference_does(heads, bits, dtype, group, by_token: bool):
    dim = heads[2]
    tokens, pages = uneven(group, dim, dtype), empty_pages(group, dim, bits)
    stored = [numbers(part) for part in vars(pages).values()]
    lie, strides = (
        (tokens, (dim, 3 * dim)) if by_token else (tokens.transpose(1, 2).contiguous(), (group * dim, dim))
    )
    flat = numbers(lie.view(-1))
    kernels(dtype).code_page(flat, flat, 0, tokens[0].numel(), *strides, 1, *stored)
    turned = (rotate_reference(side).half().transpose(0, 1) for side in tokens)
    want = kvarn.quantize_reference(*turned, bits)
    for found, expected, of_bits in (
        (pages.key_words, want.key_words, 4),
        (pages.value_words, want.value_words, bits),
    ):
        same = unpack(found[1], of_bits) == unpack(expected, of_bits)
        assert float(same.float().mean()) >= 0.999 and not found[0].any()
    seen = torch.full_like(tokens, torch.nan)
    kernels(dtype).read_pages(np.array([1], np.int32), *map(numbers, seen), *stored)
    back = kvarn.dequantize_reference(KVarNTile(*(part[1] for part in vars(pages).values())))
    for found, tile, expected in zip(seen, back, kvarn.dequantize_reference(want), strict=True):
        # Scales by themselves may differ: of iterates equally even, rounding takes another one.
        off = (tile - expected).abs() > 5e-3 * expected.abs().max()
        assert float(off.float().mean()) <= 0.001
        expected = rotate_reference(tile).transpose(0, 1).to(dtype)
        torch.testing.assert_close(found, expected, rtol=1e-4 if dtype == torch.float32 else 1e-2, atol=1e-4)


def test_constant_pages_come_back_as_they_were():
    pages = empty_pages(64, 64, 2)
    stored = [numbers(part) for part in vars(pages).values()]
    ones, seen = torch.full((2, 64, 3, 64), 3.0), torch.zeros(2, 64, 3, 64)
    kernels(torch.float32).code_page(*map(numbers, ones.flatten(1)), 0, 0, 64, 192, 0, *stored)
    kernels(torch.float32).read_pages(np.array([0], np.int32), *map(numbers, seen), *stored)
    torch.testing.assert_close(seen, ones, atol=1e-2, rtol=0)


def test_halves_and_bfloat16_are_rounded_as_torch_rounds():
    x = torch.cat([torch.randn(4096) * 10.0**exponent for exponent in range(-9, 5)]).clamp(-65000, 65000)
    normal = x.abs() >= 2.0**-14

    @njit
    def rounded(x, halves, others, shorts):
        for at in range(0, len(x), 16):
            lanes.store(shorts, at, lanes.load(x, at))
            lanes.store(others, at, lanes.load(x, at))
            lanes.store(others, at, lanes.load(others, at))
        for index in range(len(x)):
            halves[index] = kvarn_tile_cpu.to_half(x[index])
            x[index] = kvarn_tile_cpu.of_half(halves[index])

    back, halves, shorts = x.clone(), np.empty(len(x), np.uint16), np.empty(len(x), np.int16)
    others = np.empty_like(halves)
    rounded(back.numpy(), halves, others, shorts)
    assert np.array_equal(halves, others)
    assert torch.equal(torch.from_numpy(halves).view(torch.float16).float(), back)
    assert torch.equal(back[normal], x.half().float()[normal])
    assert float((back - x).abs()[~normal].max()) < 2.0**-24
    assert torch.equal(torch.from_numpy(shorts).view(torch.bfloat16), x.bfloat16())


def test_exponentials_are_as_close_as_fp32_has_them():
    @njit
    def exponentials(x):
        for at in range(0, len(x), 16):
            lanes.store(x, at, lanes.exponential(lanes.load(x, at)))

    x = np.linspace(-87, 0, 4096, dtype=np.float32)
    want = np.exp(x.astype(np.float64))
    exponentials(x)
    assert float(np.abs(x / want - 1).max()) < 3e-7


def test_other_arguments_are_refused_not_compiled():
    with pytest.raises(TypeError, match="No matching definition"):
        kernels(torch.float32).read_pages(np.zeros(1, np.int64), *[np.zeros((1, 1, 1))] * 6)


def returns_one(sources: str):
    def kernel(x):
        _ = sources
        x[0] = 1

    return kernel


def test_a_kernel_is_kept_on_disk_until_any_of_its_sources_changes(monkeypatch: pytest.MonkeyPatch):
    signature = [kvarn_cpu._array(kvarn_cpu.types.float32, 1)]
    sources, hits = [], []
    for sources in ("a", "a", f"b{np.random.default_rng().integers(1 << 60)}"):
        monkeypatch.setattr(kvarn_cpu, "_sources", lambda sources=sources: sources)
        hits.append(sum(kvarn_cpu._compiled(returns_one, signature).stats.cache_hits.values()))
    assert hits[1:] == [1, 0]


def test_a_kernel_is_compiled_where_no_folder_can_be_written_to(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("numba.core.caching.CacheImpl._locator_classes", [])
    compiled = kvarn_cpu._compiled(returns_one, [kvarn_cpu._array(kvarn_cpu.types.float32, 1)])
    x = np.zeros(1, np.float32)
    compiled(x)
    assert x[0] == 1


@pytest.mark.exhaustive
def test_numba_is_imported_for_kvarn_on_a_cpu_alone():
    code = """
import sys, torch
from scalegate.layouts.kv.format import KV_FORMATS
from scalegate.layouts.kv.layer import KVShape, PoolSize, Workspaces
for name in ("int4_per_token_head", "kvarn_k4v2_g64"):
    shape, size = KVShape(1, 16, 16, torch.float32, 1), PoolSize(1, 64, 1, 1)
    KV_FORMATS[name].allocate(shape, size, torch.device("cpu"), None, Workspaces())
    print("numba" in sys.modules)
"""
    found = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert found.stdout.split() == ["False", "True"], found.stderr
