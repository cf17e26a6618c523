"""One layer's int4 or NVFP4 tokens on a GPU. Kernels are in `kernels/attention/per_token/`."""

from dataclasses import replace

import torch
from torch import Tensor

from ...kernels.attention.choose_prefill import attend_prefill
from ...kernels.attention.coded.rotate_back import rotate_back
from ...kernels.attention.decode import DecodeWorkspace
from ...kernels.attention.options import AttentionOptions
from ...kernels.attention.per_token.decode import token_decode
from ...kernels.attention.per_token.prefill import token_prefill
from ...kernels.attention.per_token.store import TokenPages, rotate_heads, store_tokens
from ...kernels.attention.per_token.widen import widen_tokens
from .attention_metadata import AttentionMetadata
from .cuda import PrefillPages, refuse_page_size
from .layer import KVShape, PoolSize, Workspaces, by_token, widened


class CodedCudaLayerKV:
    """One layer's pages of keys and of values, [P, H_kv, page, ...], as the kernels need them."""

    def __init__(
        self,
        keys: TokenPages,
        values: TokenPages,
        rotated: bool,
        shape: KVShape,
        size: PoolSize,
        workspaces: Workspaces,
    ):
        """shape: the padded shape. rotated: whether keys and values get a Hadamard rotation before they are
        stored."""
        refuse_page_size(size.page_size)
        self.keys, self.values, self.rotated = keys, values, rotated
        heads, dim, max_context = shape.query_heads, shape.key_dim, size.max_pages * size.page_size
        self.dim = dim
        self._workspace = workspaces.get(
            (DecodeWorkspace, heads, dim),
            lambda: DecodeWorkspace.allocate(size.max_requests, heads, dim, max_context, keys.words.device),
        )
        self._prefill_pages = workspaces.get(PrefillPages, PrefillPages)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        metadata: AttentionMetadata,
        options: AttentionOptions,
        sinks: Tensor | None,
    ) -> Tensor:
        value_dim, lengths, dtype = value.shape[2], metadata.decode_seq_lens, query.dtype
        query, key, value = (by_token(widened(x, self.dim)) for x in (query, key, value))
        store_tokens(key, value, metadata.slot_mapping, self.keys, self.values, self.rotated)
        query = query.contiguous()
        if self.rotated:
            query = rotate_heads(query, torch.float16)
        output = torch.empty(query.shape, dtype=dtype, device=query.device)
        options = replace(options, sinks=sinks)
        # Zeros for requests that do not decode; those of prompts are written over.
        rows, pages = min(len(query), len(lengths)), (self.keys, self.values, metadata.block_table)
        token_decode(
            query[:rows],
            *pages,
            lengths,
            self._workspace,
            rotated=self.rotated,
            options=options,
            out=output[:rows],
        )
        # Where bits are kept large steps are computed as small ones are.
        host = metadata.host if metadata.batch_invariance == "tuned" else None
        if metadata.prefill_tiles is not None:
            prompts = torch.empty_like(query) if self.rotated else output
            if host is not None:
                # A step so large that it is no graph reads each page many times: codes are decoded once.
                which, table = self._prefill_pages.of(host, query.device)
                plain = widen_tokens(self.keys, which), widen_tokens(self.values, which)
                scaled = replace(options, key_scale=self.keys.head_scale, value_scale=self.values.head_scale)
                tiles = metadata.prefill_tiles
                attend_prefill(query, *plain, table, tiles, scaled, prompts, one_form=False)
            else:
                token_prefill(query, *pages, metadata.prefill_tiles, options, prompts)
            if self.rotated:
                num_decodes = None if host is None else host.num_decodes
                rotate_back(prompts, lengths, output, num_decodes)
        return output[..., :value_dim]
