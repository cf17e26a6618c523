"""Attention metadata: which request each token of a step belongs to, and where its keys and values lie.

CPU and GPU, decode and prefill share one type. A mixed batch holds decoding requests first, with one query
token each, then prefill chunks, then padding; decode-only and prefill-only batches are special cases of it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from ...base.batch_invariance import BatchInvariance


@dataclass(frozen=True)
class RequestTokens:
    """One request's part of a step: its tokens start .. start + count."""

    row: int
    """The request's row of per-request storage."""
    first_token: int
    """The index of the request's first token in the step."""
    start: int
    """The position of that token in the request: the number of tokens stored in earlier steps."""
    count: int
    pages: np.ndarray
    """int32, the pages of its whole context, in order."""


@dataclass(frozen=True, eq=False)
class HostMetadata:
    """The metadata in host memory. The arrays are overwritten when the step after the next one is staged."""

    num_decodes: int
    """Number of decoding requests, which have one query token each and come first in the step."""
    num_prefills: int
    """Number of prefill chunks, which come after the decoding requests."""
    num_tokens: int
    """Number of tokens in the step, without the padding that follows them."""
    block_table: np.ndarray
    """int32 [R, W]."""
    seq_lens: np.ndarray
    """int32 [R]."""
    query_start_loc: np.ndarray
    """int32 [R + 1]."""
    request_rows: np.ndarray
    """int64 [R]."""
    page_size: int

    def requests(self, first: int = 0) -> Iterator[RequestTokens]:
        """Yield each request from the `first`-th on, without padding; requests from `num_decodes` on are
        prefill chunks.
        """
        for index in range(first, self.num_decodes + self.num_prefills):
            begin, end = int(self.query_start_loc[index]), int(self.query_start_loc[index + 1])
            seq_len = int(self.seq_lens[index])
            pages = self.block_table[index, : -(-seq_len // self.page_size)]
            yield RequestTokens(
                int(self.request_rows[index]), begin, seq_len - (end - begin), end - begin, pages
            )


@dataclass(frozen=True, eq=False)
class AttentionMetadata:
    """One step's T tokens and R requests, as attention and a KV format's storage need them.

    On a GPU the tensors are at static addresses, which CUDA graphs read. Padding tokens belong to no request,
    except in a decode-only batch, where each belongs to a padding request of length 0.
    """

    slot_mapping: Tensor
    """int64 [T]: page * page_size + offset, where each token's key and value go; -1 for padding."""
    positions: Tensor
    """int64 [T], each token's position in its request; 0 for padding."""
    token_rows: Tensor
    """int64 [T], the row of each token's request; `PoolSize.max_requests` for padding."""
    block_table: Tensor
    """int32 [R, W]: each request's pages in order; undefined after its last one."""
    seq_lens: Tensor
    """int32 [R], length of each request's context with this step's tokens; 0 for padding."""
    decode_seq_lens: Tensor
    """int32 [R], the length of each decoding request's context; 0 for all other requests."""
    query_start_loc: Tensor
    """int32 [R + 1]: request r has tokens query_start_loc[r] .. query_start_loc[r + 1] of the step."""
    request_rows: Tensor
    """int64 [R]: the row of per-request storage that each request has while it runs."""
    prefill_tiles: Tensor | None
    """int32 [N, 4], tiles of prefill chunks and padding (`kernels/attention/prefill.py`).

    None in a decode-only batch, and on the CPU.
    """
    page_size: int
    host: HostMetadata | None
    """The same on the host; None inside a CUDA graph, since it differs from launch to launch."""
    batch_invariance: BatchInvariance = "tuned"
    """The mode of attention: what a token's output may depend on."""
