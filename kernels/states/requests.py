"""Device functions that find the requests of a `StateBatch`, and each request's tokens.

query_start_loc, seq_lens, request_rows    as in `batch.py`
"""

from ..triton_imports import tl, triton

BLOCK = tl.constexpr(256)
"""Requests that are looked at together."""


@triton.jit
def tokens_of(request, query_start_loc, seq_lens, DECODE_ONLY: tl.constexpr):
    """Return a request's first token in the step, how many it has (0 for padding), and whether its state
    counts, which is of earlier tokens.
    """
    seq_len = tl.load(seq_lens + request)
    if DECODE_ONLY:
        first = request
        count = tl.minimum(seq_len, 1)
    else:
        first = tl.load(query_start_loc + request)
        count = tl.load(query_start_loc + request + 1) - first
        count = tl.where(seq_len > 0, count, 0)
    return first, count, seq_len > count


@triton.jit
def scanned_request(index, query_start_loc, seq_lens, R):
    """Return the request with more than one token that has `index` such requests before it; R if there is
    none."""
    request = 0
    scanned_before = 0
    for start in range(0, R, BLOCK):
        of_block = start + tl.arange(0, BLOCK)
        exists = of_block < R
        first = tl.load(query_start_loc + of_block, mask=exists, other=0)
        end = tl.load(query_start_loc + of_block + 1, mask=exists, other=0)
        seq_len = tl.load(seq_lens + of_block, mask=exists, other=0)
        scanned = ((end - first > 1) & (seq_len > 0)).to(tl.int32)
        until = scanned_before + tl.cumsum(scanned, 0)
        request += tl.sum((exists & (until <= index)).to(tl.int32), 0)
        scanned_before += tl.sum(scanned, 0)
    return request


@triton.jit
def requests_of(token, query_start_loc, seq_lens, request_rows, R, DECODE_ONLY: tl.constexpr):
    """Return of each token [N]: whether it belongs to a request, and that request's first token, row, and
    whether its state counts, which is of earlier tokens.
    """
    request = token
    if not DECODE_ONLY:
        request = tl.zeros_like(token)
        for start in range(0, R, BLOCK):
            of_block = start + tl.arange(0, BLOCK)
            exists = of_block < R
            end = tl.load(query_start_loc + of_block + 1, mask=exists, other=0)
            ended = exists[None, :] & (end[None, :] <= token[:, None])
            request += tl.sum(ended.to(tl.int32), 1)
    exists = request < R
    seq_len = tl.load(seq_lens + request, mask=exists, other=0)
    row = tl.load(request_rows + request, mask=exists, other=0)
    exists = exists & (seq_len > 0)
    if DECODE_ONLY:
        return exists, token, row, seq_len > 1
    first = tl.load(query_start_loc + request, mask=exists, other=0)
    end = tl.load(query_start_loc + request + 1, mask=exists, other=0)
    return exists, first, row, seq_len > end - first
