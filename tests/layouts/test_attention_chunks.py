"""Chunked attention equals attention under transformers' own mask of chunks, on the CPU and for kernels."""

import itertools

import numpy as np
import pytest
import torch
from scalegate.base.errors import UserError
from scalegate.kernels.attention.decode import decode_attention_reference
from scalegate.kernels.attention.options import AttentionOptions
from scalegate.kernels.attention.prefill import prefill_attention_reference, tiles_of
from scalegate.layouts.kv.attention_chunks import ChunkedLayerKV, refuse_chunk, tensors_in_chunks
from scalegate.layouts.kv.attention_metadata import AttentionMetadata, HostMetadata
from scalegate.layouts.kv.format import KV_FORMATS
from scalegate.layouts.kv.layer import KVShape, PoolSize, Workspaces
from torch.nn import functional
from transformers.masking_utils import chunked_causal_mask_function

PAGE, CHUNK, HEADS, KV_HEADS, DIM = 16, 128, 4, 2, 16
LENGTHS = 300, 128, 129, 1
"""Contexts: of several chunks, of one, of one and a token, of a token."""
OPTIONS = AttentionOptions(DIM**-0.5)
CPU = torch.device("cpu")


def expected(query, key, value, chunk: int):
    """query [T, H, D] of a whole context, under transformers' mask."""
    allowed = chunked_causal_mask_function(chunk, torch.zeros(1, dtype=torch.int64))
    none, at = torch.tensor(0), torch.arange(len(query))
    mask = allowed(none, none, at[:, None], at[None, :])
    heads_first = (x.transpose(0, 1)[None].double() for x in (query, key, value))
    output = functional.scaled_dot_product_attention(
        *heads_first, attn_mask=mask, scale=OPTIONS.scale, enable_gqa=True
    )
    return output[0].transpose(0, 1)


def contexts():
    generator = torch.Generator().manual_seed(3)
    return [
        tuple(torch.randn(length, heads, DIM, generator=generator) for heads in (HEADS, KV_HEADS, KV_HEADS))
        for length in LENGTHS
    ]


def block_table() -> np.ndarray:
    width = -(-max(LENGTHS) // PAGE)
    table, page = np.zeros((len(LENGTHS), width), np.int32), 0
    for row, length in zip(table, LENGTHS, strict=True):
        count = -(-length // PAGE)
        row[:count] = np.arange(page + count, page, -1)  # in an order of their own
        page += count
    return table


def step(starts, ends, decodes: int, on_gpu: bool) -> AttentionMetadata:
    """Tokens starts .. ends of each context, of which the first `decodes` are one token each."""
    counts, table = [end - start for start, end in zip(starts, ends, strict=True)], block_table()
    there = np.array(counts) > 0
    positions = [np.arange(start, end) for start, end in zip(starts, ends, strict=True)]
    slots = [table[row, at // PAGE] * PAGE + at % PAGE for row, at in enumerate(positions)]
    rows = np.arange(len(ends))[there]
    counts = [count for count in counts if count]
    chunks = [
        (count, starts[row], index) for index, (row, count) in enumerate(zip(rows, counts, strict=True))
    ]
    starts_of = np.cumsum([0, *counts]).astype(np.int32)
    table, seq_lens = table[there], np.array(ends, np.int32)[there]
    decoding = np.where(np.arange(len(rows)) < decodes, seq_lens, 0).astype(np.int32)
    host = HostMetadata(
        decodes, len(rows) - decodes, sum(counts), table, seq_lens, starts_of, rows.astype(np.int64), PAGE
    )
    return AttentionMetadata(
        slot_mapping=torch.from_numpy(np.concatenate(slots).astype(np.int64)),
        positions=torch.from_numpy(np.concatenate(positions)),
        token_rows=torch.from_numpy(np.repeat(rows, counts)),
        block_table=torch.from_numpy(table),
        seq_lens=torch.from_numpy(seq_lens),
        decode_seq_lens=torch.from_numpy(decoding),
        query_start_loc=torch.from_numpy(starts_of),
        request_rows=torch.from_numpy(rows),
        # 5 tokens of padding, which belong to no context.
        prefill_tiles=torch.from_numpy(tiles_of(decodes, chunks[decodes:], 5)) if on_gpu else None,
        page_size=PAGE,
        host=host,
    )


@pytest.mark.parametrize("kv_format", ["unquantized", "int8_per_token_head", "int4_per_token_head"])
def test_prompts_in_pieces_and_decoding_attend_to_their_own_chunk(kv_format: str):
    data, workspaces = contexts(), Workspaces()
    dim = 64 if kv_format.startswith("int4") else DIM
    shape = KVShape(KV_HEADS, dim, dim, torch.float32, HEADS, CHUNK)
    data = [tuple(functional.pad(x, (0, dim - DIM)) for x in context) for context in data]
    pages = 1 + int(block_table().max())
    size = PoolSize(pages, PAGE, len(LENGTHS), block_table().shape[1])
    storage = KV_FORMATS[kv_format].allocate(shape, size, CPU, None, workspaces)
    layer = ChunkedLayerKV(storage, CHUNK, False, workspaces)
    outputs = [[] for _ in data]
    last = [length - 1 for length in LENGTHS]
    # Pieces end before, at and after the ends of chunks; the last token of each context is decoded.
    cuts = [[min(cut, end) for end in last] for cut in (0, 100, 128, 299)]
    for starts, ends, decodes in [
        *((starts, ends, 0) for starts, ends in itertools.pairwise(cuts)),
        (last, list(LENGTHS), len(LENGTHS)),
    ]:
        taken = [
            [x[start:end] for x in context] for context, start, end in zip(data, starts, ends, strict=True)
        ]
        query, key, value = (torch.cat(parts) for parts in zip(*taken, strict=True))
        if not len(query):
            continue
        output = layer.forward(query, key, value, step(starts, ends, decodes, False), OPTIONS, None)
        counts = [end - start for start, end in zip(starts, ends, strict=True)]
        for found, part in zip(outputs, output.split(counts), strict=True):
            found.append(part)
    rounding = {"unquantized": 1e-5, "int8_per_token_head": 0.05, "int4_per_token_head": 1.0}[kv_format]
    for context, found in zip(data, outputs, strict=True):
        assert (torch.cat(found) - expected(*context, CHUNK)).abs().max() < rounding


def test_kernels_read_chunks_as_contexts():
    data, table = contexts(), block_table()
    shape = 1 + int(table.max()), KV_HEADS, PAGE, DIM
    keys, values = torch.zeros(shape), torch.zeros(shape)
    for row, (_, key, value) in zip(table, data, strict=True):
        for token in range(len(key)):
            keys[row[token // PAGE], :, token % PAGE] = key[token]
            values[row[token // PAGE], :, token % PAGE] = value[token]
    starts, ends = [299, 127, 100, 0], list(LENGTHS)
    whole = step(starts, ends, 2, True)
    metadata = tensors_in_chunks(whole, CHUNK)
    taken = [context[0][start:end] for context, start, end in zip(data, starts, ends, strict=True)]
    query = torch.cat([*taken, torch.zeros(5, HEADS, DIM)])
    output = decode_attention_reference(
        query[:4], keys, values, metadata.block_table, metadata.decode_seq_lens, OPTIONS
    )
    found = prefill_attention_reference(
        query, keys, values, metadata.block_table, metadata.prefill_tiles, OPTIONS
    )
    found[:2] = output[:2]
    wanted = [
        expected(*context, CHUNK)[start:end] for context, start, end in zip(data, starts, ends, strict=True)
    ]
    torch.testing.assert_close(found, torch.cat([*wanted, torch.zeros(5, HEADS, DIM)]), atol=1e-5, rtol=0)
    plain = prefill_attention_reference(query, keys, values, whole.block_table, whole.prefill_tiles, OPTIONS)
    assert (plain - found).abs().max() > 0.1


def test_a_step_with_the_metadata_of_the_one_before_is_rewritten():
    """As CUDA graphs have it, whose arrays are written anew at the same addresses."""
    lengths = []

    class Storage:
        def forward(self, query, key, value, metadata, options, sinks):
            lengths.append(metadata.decode_seq_lens.tolist())
            return query

    workspaces, metadata = Workspaces(), step([299, 127, 128, 0], list(LENGTHS), 4, True)
    layers = [ChunkedLayerKV(Storage(), CHUNK, True, workspaces) for _ in range(2)]
    for tokens in ([300, 128, 129, 1], [301, 129, 130, 2]):
        metadata.decode_seq_lens.copy_(torch.tensor(tokens))
        for layer in layers:
            layer.forward(torch.zeros(4, HEADS, DIM), None, None, metadata, OPTIONS, None)
    assert lengths == [[44, 128, 1, 1]] * 2 + [[45, 1, 2, 2]] * 2


def test_chunks_that_are_no_whole_pages_are_refused():
    with pytest.raises(UserError, match="chunks of whole pages, 16 tokens each"):
        refuse_chunk(24, 16, CPU)
    with pytest.raises(UserError, match="of 128 tokens or more"):
        refuse_chunk(64, 64, torch.device("cuda"))
    refuse_chunk(8192, 64, torch.device("cuda"))
