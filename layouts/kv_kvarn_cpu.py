"""One layer's KVarN pages, and keys and values over them on the CPU.

Not for the arithmetic of a tile, which is in `kernels/low_bit_kv/kvarn.py`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ..kernels import paged_attention
from ..kernels.hadamard import rotate_reference
from ..kernels.low_bit_kv import kvarn, kvarn_products
from ..kernels.low_bit_kv.kvarn import KVarNTile
from ..kernels.paged_attention import AttentionOptions, TokenGroup
from .attention_metadata import AttentionMetadata, HostMetadata, RequestTokens
from .kv_cpu import DecodeGroups, on_host, with_padding
from .kv_layer import KVShape, PoolSize, Workspaces, widened, zeros


@dataclass(frozen=True)
class KVarNStorage:
    """One layer's pages, rotated and quantized, and what each request keeps in 16 bits, rotated too.

    pages: a KVarNTile of [pages, H_kv] tiles
    held:  fp16 [rows + 1, 2, 2, H_kv, G, D]: the first page and the one being written, keys and values
    """

    pages: KVarNTile
    held: Tensor
    value_bits: int

    @classmethod
    def allocate(
        cls, shape: KVShape, size: PoolSize, value_bits: int, device: torch.device
    ) -> "KVarNStorage":
        """shape: padded."""
        group, dim, tiles = size.page_size, shape.key_dim, (size.num_pages, shape.heads)
        pages = KVarNTile(
            zeros((*tiles, group, dim // 4), torch.int16, device),
            zeros((*tiles, group * value_bits // 4, dim // 4), torch.int16, device),
            zeros((*tiles, 3, dim), torch.float16, device),
            zeros((*tiles, 3, group), torch.float16, device),
        )
        held = (size.max_requests + 1, 2, 2, shape.heads, group, dim)
        return cls(pages, zeros(held, torch.float16, device), value_bits)

    @property
    def group_size(self) -> int:
        return self.held.shape[4]

    @property
    def dim(self) -> int:
        return self.held.shape[5]

    def store(self, pages: Tensor, key: Tensor, value: Tensor) -> None:
        """Quantize whole pages, key and value fp16 [n, H_kv, G, D], into the pages int64 [n]."""
        new = kvarn.quantize_reference(key, value, self.value_bits)
        for name, part in vars(new).items():
            getattr(self.pages, name).index_copy_(0, pages, part)

    def read(self, pages: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values [n, G, H_kv, D] of the pages int64 [n]."""
        tile = KVarNTile(*(part.index_select(0, pages) for part in vars(self.pages).values()))
        key, value = kvarn.dequantize_reference(tile)
        return key.to(dtype).transpose(1, 2), value.to(dtype).transpose(1, 2)


class KVarNCpuLayerKV:
    """One layer on the CPU."""

    def __init__(self, storage: KVarNStorage, workspaces: Workspaces):
        self.storage = storage
        self._groups = workspaces.get(DecodeGroups, DecodeGroups)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        metadata: AttentionMetadata,
        options: AttentionOptions,
        sinks: Tensor | None,
    ) -> Tensor:
        host, padded, value_dim, dtype = on_host(metadata), len(query), value.shape[2], query.dtype
        one_by_one = metadata.numerics != "tuned"
        # Where bits are kept all passes have one size, and so has this product.
        rows = padded if one_by_one else host.num_tokens
        query, key, value = (
            rotate_reference(widened(x[:rows], self.storage.dim)) for x in (query, key, value)
        )
        query, new = query.to(dtype), torch.stack([key, value], 1).half()
        output = torch.zeros_like(query)
        if host.num_decodes and not one_by_one:
            decoding = slice(host.num_decodes)
            self._append(new[decoding], host)
            groups = self._groups.of(metadata, query)
            output[decoding] = self._decode(query[decoding], groups, host, options, sinks)
        for chunk in _tokens(host) if one_by_one else host.requests(host.num_decodes):
            tokens = slice(chunk.first_token, chunk.first_token + chunk.count)
            output[tokens] = self._prefill(query[tokens], new[tokens], chunk, options, sinks)
        return with_padding(rotate_reference(output)[..., :value_dim].to(dtype), padded)

    def _append(self, new: Tensor, host: HostMetadata) -> None:
        """One token, [B, 2, H_kv, D], for each decoding request; pages that become full are quantized."""
        rows, lengths = host.request_rows[: len(new)], host.seq_lens[: len(new)]
        own_page, offset = np.divmod(lengths - 1, self.storage.group_size)
        at = (rows, np.minimum(own_page, 1), slice(None), slice(None), offset)
        self.storage.held[at] = new
        due = np.flatnonzero((own_page > 0) & (offset == self.storage.group_size - 1))
        if len(due):
            full = self.storage.held[rows[due], 1]
            pages = torch.from_numpy(host.block_table[due, own_page[due]].astype(np.int64))
            self.storage.store(pages, full[:, 0], full[:, 1])

    def _decode(
        self,
        query: Tensor,
        groups: list[TokenGroup],
        host: HostMetadata,
        options: AttentionOptions,
        sinks: Tensor | None,
    ) -> Tensor:
        output = torch.empty_like(query)
        rows, lengths = (torch.from_numpy(x[: len(query)]).long() for x in (host.request_rows, host.seq_lens))
        for group in groups:
            which = group.tokens
            output[which] = self._decode_group(
                query[which].float(), rows[which], lengths[which], group.pages, options, sinks
            ).to(query.dtype)
        return output

    def _decode_group(
        self,
        query: Tensor,
        rows: Tensor,
        lengths: Tensor,
        pages: Tensor,
        options: AttentionOptions,
        sinks: Tensor | None,
    ) -> Tensor:
        """fp32 [b, H, D]; lengths int64 [b], pages int64 [b, m]."""
        group, kv_heads = self.storage.group_size, self.storage.held.shape[3]
        own, count = (lengths - 1) // group, pages.shape[1]
        query = query.unflatten(1, (kv_heads, -1))
        key, value = self._held(rows, min(count, 2), int(lengths.max()))
        token = torch.arange(key.shape[2])
        # What is held counts 0 .. G on the first page and G .. 2G on the own one.
        hidden = (token >= (lengths - (own - 1).clamp(min=0) * group)[:, None])[:, None, None]
        if count <= 2 and options.softcap is None and sinks is None:
            return functional.scaled_dot_product_attention(
                query, key, value, attn_mask=~hidden, scale=options.scale
            ).flatten(1, 2)
        scores = [query @ key.mT]
        if count > 2:
            tile = self._tiles(pages[:, 1 : count - 1])
            coded = kvarn_products.key_scores(
                query[:, None].expand(-1, count - 2, -1, -1, -1).flatten(0, 1), tile
            )
            scores.append(coded.unflatten(0, (len(query), -1)).movedim(1, 3).flatten(3))
            later = (torch.arange(1, count - 1) >= own[:, None]).repeat_interleave(group, 1)
            hidden = torch.cat([hidden, later[:, None, None]], -1)
        bias = torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
        probability = paged_attention.probabilities(torch.cat(scores, -1), bias, options, sinks)
        output = probability[..., : len(token)] @ value
        if count > 2:
            by_page = probability[..., len(token) :].unflatten(-1, (-1, group)).movedim(3, 1).flatten(0, 1)
            output += kvarn_products.value_sums(by_page, tile).unflatten(0, (len(query), -1)).sum(1)
        return output.flatten(1, 2)

    def _held(self, rows: Tensor, pages: int, longest: int) -> tuple[Tensor, Tensor]:
        """Keys and values fp32 [b, H_kv, n, D] of the first page and, of two, the one being written."""
        first = int(rows[0])
        neighbours = torch.equal(rows, torch.arange(first, first + len(rows)))
        held = self.storage.held[first : first + len(rows)] if neighbours else self.storage.held[rows]
        held = held[:, :pages] if pages > 1 else held[:, :1, :, :, :longest]
        sides = held.permute(2, 0, 3, 1, 4, 5).to(torch.float32, memory_format=torch.contiguous_format)
        key, value = sides.flatten(3, 4).unbind()
        return key, value

    def _tiles(self, pages: Tensor) -> KVarNTile:
        """int64 [b, c] pages as [b * c, H_kv] tiles."""
        return KVarNTile(*(part[pages.flatten()] for part in vars(self.storage.pages).values()))

    def _prefill(
        self,
        query: Tensor,
        new: Tensor,
        chunk: RequestTokens,
        options: AttentionOptions,
        sinks: Tensor | None,
    ) -> Tensor:
        """One chunk: its tokens page by page, over the pages before as they are stored."""
        group, held = self.storage.group_size, self.storage.held[chunk.row]
        first_page, offset = divmod(chunk.start, group)
        end = chunk.start + chunk.count
        as_is = self._with_held(new, held[min(first_page, 1)], offset)
        full = slice(first_page == 0, (offset + chunk.count) // group)
        pages = torch.from_numpy(chunk.pages.astype(np.int64))
        written = as_is[full]
        if len(written):
            self.storage.store(pages[first_page:][full], written[:, 0], written[:, 1])
        if first_page == 0:
            held[0] = as_is[0]
        if len(pages) > 1:
            held[1] = as_is[-1]

        key, value = self.storage.read(pages, query.dtype)
        key[0], value[0] = held[0].transpose(1, 2).to(query.dtype)
        output = torch.empty_like(query)
        for page in range(first_page, len(pages)):
            start, stop = max(page * group, chunk.start), min((page + 1) * group, end)
            tokens = slice(start - chunk.start, stop - chunk.start)
            piece = paged_attention.prefill_group(
                0, start, stop - start, chunk.pages[: page + 1], group, None, query
            )
            stored = key[page].clone(), value[page].clone()
            key[page], value[page] = as_is[page - first_page].transpose(1, 2).to(query.dtype)
            output[tokens] = paged_attention.attend_group(
                query[tokens], key[: page + 1], value[: page + 1], piece, options, sinks
            )
            if page:
                key[page], value[page] = stored
        return output

    def _with_held(self, new: Tensor, held: Tensor, offset: int) -> Tensor:
        """Whole pages fp16 [n, 2, H_kv, G, D]: `offset` tokens of the page held, then new [T, 2, H_kv, D]."""
        group = self.storage.group_size
        total = offset + len(new)
        tokens = new.new_zeros(-(-total // group) * group, *new.shape[1:])
        tokens[:offset] = held[:, :, :offset].movedim(2, 0)
        tokens[offset:total] = new
        return tokens.unflatten(0, (-1, group)).movedim(1, 3)


def _tokens(host: HostMetadata) -> Iterator[RequestTokens]:
    """Each token as a chunk of its own: torch's products then see shapes that follow from its context alone,
    and every page is quantized by itself."""
    for request in host.requests():
        for index in range(request.count):
            position = request.start + index
            pages = request.pages[: position // host.page_size + 1]
            yield replace(
                request, first_token=request.first_token + index, start=position, count=1, pages=pages
            )
