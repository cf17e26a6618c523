"""Contexts as KVarN keeps them, written by torch, and attention to them; not a test by itself."""

from dataclasses import dataclass, replace

import torch
from scalegate.kernels.attention.kvarn.reference import KVarNTile, dequantize_reference, quantize_reference
from scalegate.kernels.hadamard import rotate_reference


@dataclass
class Contexts:
    """Requests' tokens as they came, [L, heads, D] each, and the same as pages and rows hold them."""

    queries: list[torch.Tensor]
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    seen: list[tuple[torch.Tensor, torch.Tensor]]
    """Keys and values of whole pages as codes give them back, fp32."""
    pages: KVarNTile
    held: torch.Tensor
    table: torch.Tensor
    rows: torch.Tensor
    group_size: int

    def expected(
        self, request: int, position: int, scale: float, softcap=0.0, sinks=None, rounded: bool = False
    ) -> torch.Tensor:
        """[H, D], fp64, of one token; rounded: its query meets codes as `products_with_page` says."""
        own = position // self.group_size * self.group_size
        key, value = (
            torch.cat([x[: self.group_size], coded[self.group_size : own], x[own:]]).double()
            if own
            else x.double()
            for x, coded in zip((self.keys[request], self.values[request]), self.seen[request], strict=True)
        )
        query = self.queries[request][position].double()
        groups = query.shape[0] // key.shape[1]
        key, value = (x[: position + 1].repeat_interleave(groups, 1) for x in (key, value))
        scores = torch.einsum("hd,nhd->hn", query, key)
        for start in range(self.group_size, own if rounded else 0, self.group_size):
            page = int(self.table[request, start // self.group_size])
            scores[:, start : start + self.group_size] = self.products_with_page(query, page)
        scores = scores * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, None].double()], 1)
        return torch.einsum("hn,nhd->hd", scores.softmax(-1)[:, : position + 1], value)

    def products_with_page(self, query: torch.Tensor, page: int) -> torch.Tensor:
        """[H, G] of queries [H, D] with a page's keys, rounded to fp16 where the prefill kernel rounds.

        That is queries before and after they are rotated, and times k_scale: of a result's error, the part
        that grows with the logits. Devices agree on codes, but not on scales, since the last of KVarN's
        iterates are equally even in fp32: one result was 1.1e-3 off with a CPU's scales and 3.1e-3 with
        an H200's.
        """
        groups = len(query) // self.pages.tokens.shape[1]
        tile = KVarNTile(*(part[page].repeat_interleave(groups, 0) for part in vars(self.pages).values()))
        scale, zero, of_value = tile.channels.float().unbind(1)
        turned = rotate_reference(query.half()).half().float()
        channels = torch.stack([(turned * scale).half(), turned * zero, of_value], 1)
        return dequantize_reference(replace(tile, channels=channels))[0].sum(-1)


def contexts_of(
    lengths: list[int],
    heads: tuple[int, int, int],
    bits: int,
    dtype: torch.dtype,
    group_size: int,
    device: torch.device | str = "cpu",
) -> Contexts:
    query_heads, kv_heads, dim = heads
    generator = torch.Generator().manual_seed(sum(lengths))
    uneven = torch.rand(dim, generator=generator) * 3 + 0.2

    def tokens(count: int, n: int) -> torch.Tensor:
        return (torch.randn(count, n, dim, generator=generator) * uneven).to(device, dtype)

    queries, keys, values = (
        [tokens(length, n) for length in lengths] for n in (query_heads, *[kv_heads] * 2)
    )
    counts = [-(-length // group_size) for length in lengths]
    order = torch.randperm(sum(counts), generator=generator).int().to(device)
    table = torch.zeros(len(lengths), max(counts) + 1, dtype=torch.int32, device=device)
    for row, (pages, count) in enumerate(zip(order.split(counts), counts, strict=True)):
        table[row, :count] = pages
    zeros = torch.zeros(sum(counts), kv_heads, group_size, dim)
    stored = quantize_reference(zeros, zeros, bits)
    stored = KVarNTile(*(part.to(device) for part in vars(stored).values()))
    rows = torch.randperm(len(lengths), generator=generator).to(device)
    held = torch.full((len(lengths) + 1, 2, 2, kv_heads, group_size, dim), 7.0, dtype=dtype, device=device)
    seen = []
    for request, (key, value) in enumerate(zip(keys, values, strict=True)):
        whole = len(key) // group_size * group_size
        tiles = [
            rotate_reference(x[:whole]).unflatten(0, (-1, group_size)).transpose(1, 2) for x in (key, value)
        ]
        written = quantize_reference(*tiles, bits)
        for part, of_one in zip(vars(stored).values(), vars(written).values(), strict=True):
            part[table[request, : whole // group_size].long()] = of_one
        back = dequantize_reference(written)
        seen.append(tuple(rotate_reference(x.transpose(1, 2).flatten(0, 1)) for x in back))
        hold(held[int(rows[request])], key, value, len(key))
    return Contexts(queries, keys, values, seen, stored, held, table, rows, group_size)


def hold(held: torch.Tensor, key: torch.Tensor, value: torch.Tensor, length: int) -> None:
    """What a row holds of a context's first `length` tokens: page 0, and the page of the last one."""
    group_size = held.shape[3]
    own = max(length - 1, 0) // group_size * group_size
    for side, x in enumerate((key, value)):
        for which, start in ((0, 0), (1, own)):
            part = x[start : min(start + group_size, length)].transpose(0, 1)
            held[which, side, :, : part.shape[1]] = part
