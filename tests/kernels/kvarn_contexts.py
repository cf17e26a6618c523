"""Contexts as KVarN keeps them, written by torch, and attention to them; not a test by itself."""

from dataclasses import dataclass

import torch
from scalegate.kernels.hadamard import rotate_reference
from scalegate.kernels.low_bit_kv.kvarn import KVarNTile, dequantize_reference, quantize_reference


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

    def expected(self, request: int, position: int, scale: float, softcap=0.0, sinks=None) -> torch.Tensor:
        """[H, D], fp32, of one token."""
        own = position // self.group_size * self.group_size
        key, value = (
            torch.cat([x[: self.group_size].float(), coded[self.group_size : own], x[own:].float()])
            if own
            else x.float()
            for x, coded in zip((self.keys[request], self.values[request]), self.seen[request], strict=True)
        )
        query = self.queries[request][position].float()
        groups = query.shape[0] // key.shape[1]
        key, value = (x[: position + 1].repeat_interleave(groups, 1) for x in (key, value))
        scores = torch.einsum("hd,nhd->hn", query, key) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, None].float()], 1)
        return torch.einsum("hn,nhd->hd", scores.softmax(-1)[:, : position + 1], value)


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
