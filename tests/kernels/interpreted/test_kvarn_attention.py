"""KVarN's attention kernels alone, over raw tokens and pages that torch wrote, beside attention in torch.

See conftest.py.
"""

import functools

import pytest
import torch
from scalegate.kernels.attention.decode import DecodeWorkspace
from scalegate.kernels.attention.kvarn import decode as decoding
from scalegate.kernels.attention.kvarn.decode import kvarn_decode, plain_splits
from scalegate.kernels.attention.kvarn.prefill import kvarn_prefill
from scalegate.kernels.attention.options import AttentionOptions
from scalegate.kernels.attention.prefill import tiles_of
from scalegate.kernels.hadamard import rotate_reference
from scalegate.tests.exhaustive import exhaustive_but
from scalegate.tests.kernels.attention import kvarn_contexts
from scalegate.tests.kernels.attention.kvarn_contexts import Contexts, hold

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHORT = 64 if DEVICE.type == "cuda" else 16
"""Tokens of a page; half of one is a side of a product, which matrix units take 32 bytes of."""
MAX_CONTEXT = 4096
MAX_ERROR = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 2e-3}
"""Interpreters cut off what bf16 cannot hold, where a GPU rounds; codes meet fp16 everywhere."""
contexts_of = functools.partial(kvarn_contexts.contexts_of, device=DEVICE)


def decoded(contexts: Contexts, lengths: list[int], bits: int, sinks=None, **options) -> torch.Tensor:
    """[B, H, D] of each context's last token."""
    query = torch.stack([x[-1] if len(x) else x.new_zeros(x.shape[1:]) for x in contexts.queries])
    out = torch.full_like(query, torch.nan)
    batch, heads, dim = query.shape
    workspace = DecodeWorkspace.allocate(
        batch, heads, dim, MAX_CONTEXT, DEVICE, plain_splits(contexts.group_size)
    )
    workspace.partial.fill_(torch.nan)
    workspace.lse.fill_(torch.nan)
    kvarn_decode(
        query, rotate_reference(query).half(), contexts.pages, contexts.held, contexts.table,
        torch.tensor(lengths, dtype=torch.int32, device=DEVICE), contexts.rows, workspace,
        value_bits=bits, options=AttentionOptions(dim**-0.5, sinks=sinks, **options), out=out,
    )  # fmt: skip
    return out


def check_decoded(contexts: Contexts, out: torch.Tensor, lengths: list[int], scale: float, **options) -> None:
    for request, length in enumerate(lengths):
        if length == 0:
            assert not out[request].any()
            continue
        want = contexts.expected(request, length - 1, scale, **options)
        error = (out[request].float() - want).norm() / want.norm()
        assert error < MAX_ERROR[out.dtype], (length, float(error))


RAGGED = [0, 1, SHORT - 1, SHORT, SHORT + 1, 2 * SHORT, 2 * SHORT + 1, 3 * SHORT + 5]
RAGGED += [7 * SHORT, 14 * SHORT + 3]
CASES = [
    ((6, 2, 64), 4, torch.float16),
    ((16, 1, 64), 4, torch.bfloat16),
    ((1, 1, 128), 2, torch.float32),
    ((2, 1, 256), 2, torch.bfloat16),
]
EVERY = pytest.mark.parametrize("heads, bits, dtype", exhaustive_but(CASES, CASES[1]), ids=str)


@EVERY
def test_decoding_at_ragged_lengths(heads: tuple[int, int, int], bits: int, dtype: torch.dtype):
    contexts = contexts_of(RAGGED, heads, bits, dtype, SHORT)
    out = decoded(contexts, RAGGED, bits)
    assert out.dtype == dtype
    check_decoded(contexts, out, RAGGED, heads[2] ** -0.5)


def test_decoding_with_softcap_and_sinks():
    heads, lengths = (4, 2, 64), [0, 3, SHORT, 4 * SHORT - 2]
    contexts = contexts_of(lengths, heads, 2, torch.bfloat16, SHORT)
    options = {"softcap": 2.0, "sinks": torch.tensor([1.0, -2.0, 3.0, 0.5], device=DEVICE)}
    out = decoded(contexts, lengths, 2, **options)
    check_decoded(contexts, out, lengths, heads[2] ** -0.5, **options)


def test_decoding_over_pages_of_several_pieces():
    lengths = [1, 63, 64, 65, 128, 129, 193, 256, 257, 300, 128 * 11 + 70]
    contexts = contexts_of(lengths, (2, 1, 64), 2, torch.bfloat16, 128)
    check_decoded(contexts, decoded(contexts, lengths, 2), lengths, 64**-0.5)


def test_how_many_programs_share_the_splits_changes_no_bit(monkeypatch: pytest.MonkeyPatch):
    lengths = [SHORT, 2 * SHORT + 1, 8 * SHORT + 3]
    contexts = contexts_of(lengths, (2, 1, 64), 2, torch.bfloat16, SHORT)
    outs = []
    for programs in (1, 3, 16):
        monkeypatch.setattr(decoding, "programs_of_splits", lambda *_, programs=programs: programs)
        outs.append(decoded(contexts, lengths, 2))
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])


@pytest.mark.parametrize("group_size", [64, 128])
def test_a_workspace_has_room_for_all_splits(group_size: int):
    """Of the longest context, and of shorter ones that are cut finer."""
    for max_context in (group_size, 1024, 4096, 65536):
        workspace = DecodeWorkspace.allocate(1, 1, 1, max_context, "cpu", plain_splits(group_size))
        for length in range(1, max_context + 1, 61):
            pages = max((length - 1) // group_size - 1, 0)
            at_once = 1 if pages <= 4 else 2 if pages <= 8 else workspace.split_tokens // group_size
            assert -(-pages // at_once) + plain_splits(group_size) <= workspace.max_splits


def prefilled(
    contexts: Contexts, chunks: list[tuple[int, int]], bits: int, padding: int = 0, sinks=None, **options
) -> torch.Tensor:
    """[T, H, D] of each context's tokens from `start` to `end`, two decoding requests' tokens before them."""
    before = 2
    sides = []
    for tokens in (contexts.queries, contexts.keys, contexts.values):
        parts = [x[start:end] for x, (start, end) in zip(tokens, chunks, strict=True)]
        fill = [x.new_full((n, *x.shape[1:]), 3.0) for x, n in ((parts[0], before), (parts[0], padding))]
        sides.append(torch.cat([fill[0], *parts, fill[1]]))
    query, key, value = sides
    # As a model has them: beside each other in one tensor.
    joined = torch.cat([key, value], 1)
    key, value = joined[:, : key.shape[1]], joined[:, key.shape[1] :]
    for request, (start, _) in enumerate(chunks):
        # What was held is of an older step, and of other tokens where the chunk brings its own.
        row = contexts.held[int(contexts.rows[request])].fill_(9.0)
        hold(row, contexts.keys[request], contexts.values[request], start)
    pieces = [(end - start, start, request) for request, (start, end) in enumerate(chunks)]
    starts = torch.tensor([before, *(end - start for start, end in chunks)]).cumsum(0)
    out = torch.full_like(query, torch.nan)
    kvarn_prefill(
        query, key, value, contexts.pages, contexts.held, contexts.table,
        torch.from_numpy(tiles_of(before, pieces, padding)).to(DEVICE),
        torch.tensor([end for _, end in chunks], dtype=torch.int32, device=DEVICE),
        starts.int().to(DEVICE), contexts.rows,
        value_bits=bits, options=AttentionOptions(query.shape[2] ** -0.5, sinks=sinks, **options), out=out,
    )  # fmt: skip
    return out[before:]


CHUNKS = [(0, 1), (0, SHORT), (3, SHORT + 3), (0, 3 * SHORT + 5)]
CHUNKS += [(2 * SHORT - 3, 4 * SHORT + 1), (5 * SHORT, 5 * SHORT + 7)]


@EVERY
def test_chunks_of_prompts(heads: tuple[int, int, int], bits: int, dtype: torch.dtype):
    check_prefilled(heads, bits, dtype)


def test_chunks_of_prompts_with_softcap_sinks_and_padding():
    sinks = torch.tensor([1.0, -2.0, 3.0, 0.5], device=DEVICE)
    check_prefilled((4, 2, 64), 2, torch.bfloat16, 5, softcap=2.0, sinks=sinks)


def check_prefilled(heads, bits: int, dtype: torch.dtype, padding: int = 0, **options) -> None:
    contexts = contexts_of([end for _, end in CHUNKS], heads, bits, dtype, SHORT)
    out = prefilled(contexts, CHUNKS, bits, padding, **options)
    at = 0
    for request, (start, end) in enumerate(CHUNKS):
        for position in range(start, end):
            want = contexts.expected(request, position, heads[2] ** -0.5, rounded=True, **options)
            error = (out[at].float() - want).norm() / want.norm()
            assert error < MAX_ERROR[out.dtype], (request, position, float(error))
            at += 1
    assert not out[at:].any()
