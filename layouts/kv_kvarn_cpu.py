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
from ..kernels.paged_attention import AttentionOptions
from .attention_metadata import AttentionMetadata, HostMetadata, RequestTokens
from .kv_cpu import on_host, with_padding
from .kv_kvarn_decodes import DecodeGroup, DecodeStep, DecodeSteps
from .kv_layer import KVShape, PoolSize, Workspaces, widened, zeros


@dataclass(frozen=True)
class KVarNStorage:
    """One layer's pages, rotated and quantized, and what each request keeps as it is.

    pages: a KVarNTile of [pages, H_kv] tiles
    held:  [rows + 1, 2, 2, H_kv, G, D]: the first page and the one being written, keys and values; the
           model's dtype, not rotated, so that nothing is for contexts without codes
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
        return cls(pages, zeros(held, shape.dtype, device), value_bits)

    @property
    def group_size(self) -> int:
        return self.held.shape[4]

    @property
    def dim(self) -> int:
        return self.held.shape[5]

    def store(self, pages: Tensor, key: Tensor, value: Tensor) -> None:
        """Quantize whole pages, key and value [n, H_kv, G, D] as they came, into the pages int64 [n]."""
        key, value = rotate_reference(key).half(), rotate_reference(value).half()
        new = kvarn.quantize_reference(key, value, self.value_bits)
        for name, part in vars(new).items():
            getattr(self.pages, name).index_copy_(0, pages, part)

    def read(self, pages: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values [n, G, H_kv, D] of the pages int64 [n], rotated."""
        tile = KVarNTile(*(part.index_select(0, pages) for part in vars(self.pages).values()))
        key, value = kvarn.dequantize_reference(tile)
        return key.to(dtype).transpose(1, 2), value.to(dtype).transpose(1, 2)


class KVarNCpuLayerKV:
    """One layer on the CPU."""

    def __init__(self, storage: KVarNStorage, workspaces: Workspaces):
        self.storage = storage
        self._steps = workspaces.get(DecodeSteps, lambda: DecodeSteps(workspaces))

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        metadata: AttentionMetadata,
        options: AttentionOptions,
        sinks: Tensor | None,
    ) -> Tensor:
        host, padded, value_dim = on_host(metadata), len(query), value.shape[2]
        one_by_one = metadata.numerics != "tuned"
        query, key, value = (widened(x[: host.num_tokens], self.storage.dim) for x in (query, key, value))
        new = torch.stack([key, value], 1)
        parts: list[tuple[slice | Tensor, Tensor]] = []
        if host.num_decodes and not one_by_one:
            step = self._steps.of(metadata, key.shape[1], query)
            self._append(new[: host.num_decodes], step)
            for group in step.groups:
                parts.append((group.tokens, self._decode(query[group.tokens], group, options, sinks)))
        for chunk in _tokens(host) if one_by_one else host.requests(host.num_decodes):
            tokens = slice(chunk.first_token, chunk.first_token + chunk.count)
            parts.append((tokens, self._prefill(query[tokens], new[tokens], chunk, options, sinks)))
        output = parts[0][1]
        if len(parts) > 1 or isinstance(parts[0][0], Tensor):
            output = torch.empty_like(query)
            for where, part in parts:
                output[where] = part
        return with_padding(output[..., :value_dim], padded)

    def _append(self, new: Tensor, step: DecodeStep) -> None:
        """One token, [B, 2, H_kv, D], for each decoding request; pages that become full are quantized."""
        held, (rows, pages) = self.storage.held, step.full
        held.view(-1, self.storage.dim).index_copy_(0, step.new, new.flatten(0, 2))
        if len(rows):
            full = held[rows, 1]
            self.storage.store(pages, full[:, 0], full[:, 1])

    def _decode(
        self, query: Tensor, group: DecodeGroup, options: AttentionOptions, sinks: Tensor | None
    ) -> Tensor:
        """[b, H, D]."""
        size, kv_heads = self.storage.group_size, self.storage.held.shape[3]
        query = query.unflatten(1, (kv_heads, -1))
        key, value = self._held(group)
        coded = group.coded.shape[1]
        if not coded and options.softcap is None and sinks is None:
            return functional.scaled_dot_product_attention(
                query, key, value, attn_mask=group.bias, scale=options.scale
            ).flatten(1, 2)
        key, value = key.float(), value.float()
        scores = [query.float() @ key.mT]
        if coded:
            tile = self._tiles(group.coded)
            turned = rotate_reference(query)[:, None].expand(-1, coded, -1, -1, -1)
            of_codes = kvarn_products.key_scores(turned.flatten(0, 1), tile)
            scores.append(of_codes.unflatten(0, (len(query), -1)).movedim(1, 3).flatten(3))
        probability = paged_attention.probabilities(torch.cat(scores, -1), group.all_bias, options, sinks)
        output = probability[..., : key.shape[2]] @ value
        if coded:
            by_page = probability[..., key.shape[2] :].unflatten(-1, (-1, size)).movedim(3, 1).flatten(0, 1)
            sums = kvarn_products.value_sums(by_page, tile).unflatten(0, (len(query), -1)).sum(1)
            output += rotate_reference(sums)
        return output.flatten(1, 2).to(query.dtype)

    def _held(self, group: DecodeGroup) -> tuple[Tensor, Tensor]:
        """Keys and values [b, H_kv, n, D] of the first page and, of two, the one being written."""
        if group.held == 1:
            held = self.storage.held[:, 0, :, :, : group.longest][group.rows]
            return held[:, 0], held[:, 1]
        held = self.storage.held[group.rows]
        key, value = held.permute(2, 0, 3, 1, 4, 5).flatten(3, 4).unbind()
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
        if end <= group:
            held[0, :, :, chunk.start : end] = new.movedim(0, 2)
            return self._attend_first_page(query, held[0, :, None, :, :end], chunk, options, sinks)
        as_is = self._with_held(new, held[min(first_page, 1)], offset)
        full = slice(first_page == 0, (offset + chunk.count) // group)
        pages = torch.from_numpy(chunk.pages.astype(np.int64))
        written = as_is[full]
        if len(written):
            self.storage.store(pages[first_page:][full], written[:, 0], written[:, 1])
        if first_page == 0:
            held[0] = as_is[0]
        held[1] = as_is[-1]
        key, value = self.storage.read(pages, query.dtype)
        query = rotate_reference(query).to(query.dtype)
        as_is, first = (rotate_reference(x).transpose(-2, -3).to(query.dtype) for x in (as_is, held[0]))
        key[0], value[0] = first
        output = torch.empty_like(query)
        for page in range(first_page, len(pages)):
            start, stop = max(page * group, chunk.start), min((page + 1) * group, end)
            tokens = slice(start - chunk.start, stop - chunk.start)
            piece = paged_attention.prefill_group(
                0, start, stop - start, chunk.pages[: page + 1], group, None, query
            )
            stored = key[page].clone(), value[page].clone()
            key[page], value[page] = as_is[page - first_page]
            output[tokens] = paged_attention.attend_group(
                query[tokens], key[: page + 1], value[: page + 1], piece, options, sinks
            )
            if page:
                key[page], value[page] = stored
        return rotate_reference(output).to(query.dtype)

    def _attend_first_page(
        self,
        query: Tensor,
        held: Tensor,
        chunk: RequestTokens,
        options: AttentionOptions,
        sinks: Tensor | None,
    ) -> Tensor:
        """A chunk that ends on its first page, with keys and values [2, 1, H_kv, n, D] up to its end."""
        (key, value), count = held, len(query)
        if options.softcap is not None or sinks is not None or (chunk.start and count > 1):
            group = paged_attention.prefill_group(
                0, chunk.start, count, chunk.pages, held.shape[3], None, query
            )
            key, value = key.transpose(1, 2), value.transpose(1, 2)
            return paged_attention.attend_group(query, key, value, group, options, sinks)
        output = functional.scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            key,
            value,
            is_causal=count > 1,
            scale=options.scale,
            enable_gqa=True,
        )
        return output[0].transpose(0, 1)

    def _with_held(self, new: Tensor, held: Tensor, offset: int) -> Tensor:
        """Whole pages [n, 2, H_kv, G, D]: `offset` tokens of the page held, then new [T, 2, H_kv, D]."""
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
