"""One query's attention to KVarN tiles on a CPU, codes multiplied as they are; in torch.

As in `kvarn_page.py`: scales of channels go into the query and those of tokens into the probabilities, so
that nothing but a conversion is left for each code. Codes stand as [..., G, W, 4], W = D/4, where channel
i + j * W is [i, j]: the order in which bytes hold them.

    query          fp32 [n, H_kv, M, D], rotated; M query heads share a head of keys
    probabilities  fp32 [n, H_kv, M, G]
    tile           a KVarNTile of [n, H_kv] tiles
"""

import torch
from torch import Tensor

from .kvarn import KVarNTile


def key_scores(query: Tensor, tile: KVarNTile) -> Tensor:
    """fp32 [n, H_kv, M, G]."""
    scale, zero, _ = tile.channels.float().unbind(-2)
    scores = _as_bytes_lie(query * scale[..., None, :]) @ _codes(tile.key_words, 4).flatten(-2).mT
    return scores.add_(query @ zero[..., None]).mul_(tile.tokens[..., :1, :].float())


def value_sums(probabilities: Tensor, tile: KVarNTile) -> Tensor:
    """fp32 [n, H_kv, M, D]."""
    _, scale, zero = tile.tokens.float().unbind(-2)
    value_bits = 4 * tile.value_words.shape[-2] // tile.key_words.shape[-2]
    codes = _codes(tile.value_words, value_bits)
    sums = ((probabilities * scale[..., None, :]) @ codes.flatten(-2)).unflatten(-1, codes.shape[-2:])
    sums = sums.transpose(-1, -2).flatten(-2).add_(probabilities @ zero[..., None])
    return sums.mul_(tile.channels[..., 2:, :].float())


def _as_bytes_lie(x: Tensor) -> Tensor:
    return x.unflatten(-1, (4, -1)).transpose(-1, -2).flatten(-2)


def _codes(words: Tensor, bits: int) -> Tensor:
    """fp32 [..., G, W, 4] of words as in KVarNTile."""
    halves = words.view(torch.uint8).unflatten(-1, (-1, 2))
    if bits == 4:
        codes = torch.empty((*halves.shape, 2), dtype=torch.float32, device=words.device)
    else:
        # The upper byte is of a token half a tile further on.
        halves = torch.cat([halves[..., 0], halves[..., 1]], -2)
        codes = torch.empty((*halves.shape, 4), dtype=torch.float32, device=words.device)
    for field in range(codes.shape[-1]):
        codes[..., field] = (halves >> field * bits).bitwise_and_((1 << bits) - 1)
    return codes.flatten(-2) if bits == 4 else codes
