"""KVarN tiles in torch: one page's keys or values of one head, variance-normalized and quantized to few bits.

The method is the paper's (Muller et al., arXiv:2606.03458): a tile is scaled by rows and by columns until all
standard deviations are equal, then each row is rounded to nearest between its least and its largest value.
Rows are channels for keys and tokens for values. Tiles come rotated (`hadamard.py`).

    K[d, t] = (k_code[d, t] * k_scale[d] + k_zero[d]) * k_token[t]
    V[t, d] = (v_code[t, d] * v_scale[t] + v_zero[t]) * v_channel[d]
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..coded.words import fields, pack, unpack

ITERATIONS = 8
LEAST_STD, LARGEST_STD = 1e-3, 1e3
LEAST_LOG, LARGEST_LOG = -0.3, 10.0
LEAST_DIVISOR = 1e-8
LEAST_STEP = 1e-6
"""Of a row whose values are all the same."""


@dataclass(frozen=True)
class KVarNTile:
    """Tiles as pages hold them, G tokens of D channels each.

    key_words:   int16 [..., G, D/4], four bits; field j of word i is channel i + j * D/4
    value_words: the same, or for two bits int16 [..., G/2, D/4]: field 4h + j of word [t, i] is token
                 t + h * G/2, channel i + j * D/4
    channels:    fp16 [..., 3, D]: k_scale, k_zero, v_channel
    tokens:      fp16 [..., 3, G]: k_token, v_scale, v_zero
    """

    key_words: Tensor
    value_words: Tensor
    channels: Tensor
    tokens: Tensor


def normalize_reference(tile: Tensor) -> tuple[Tensor, Tensor]:
    """Find scales [..., R] and [..., C] that make tiles [..., R, C], divided by them, most even; all fp32.

    A tile is even if the ratio of the largest to the least standard deviation, of columns plus of rows, is
    small. Columns and rows are scaled in turn. The most even of all iterates is returned, and the tile as it
    came counts as an iterate.
    """
    squares = tile.square()
    rows, columns = torch.zeros_like(tile[..., 0]), torch.zeros_like(tile[..., 0, :])
    # Deviations under the other side's scales alone; a vector's own scale divides its deviation.
    by_row, by_column = _std(tile, squares, columns), _std(tile.mT, squares.mT, rows)
    best_rows, best_columns, least = rows, columns, _spread(by_row) + _spread(by_column)
    for _ in range(ITERATIONS):
        columns = _evened(columns, by_column)
        by_row = _std(tile, squares, columns)
        rows = _evened(rows, by_row)
        by_column = _std(tile.mT, squares.mT, rows)
        imbalance = _spread(by_row * (-rows).exp()) + _spread(by_column * (-columns).exp())
        better = (imbalance <= least)[..., None]
        best_rows = torch.where(better, rows, best_rows)
        best_columns = torch.where(better, columns, best_columns)
        least = torch.minimum(imbalance, least)
    return best_rows.exp(), best_columns.exp()


def _evened(logs: Tensor, std: Tensor) -> Tensor:
    """Advance the logarithms of scales by one turn; std: the deviations of the unscaled vectors."""
    scaled = (std * (-logs).exp()).clamp_(LEAST_STD, LARGEST_STD)
    return (logs + scaled.log_()).clamp_(LEAST_LOG, LARGEST_LOG)


def _std(tile: Tensor, squares: Tensor, logs: Tensor) -> Tensor:
    """Return std [..., R] of tiles [..., R, C] whose columns are divided by exp(logs), [..., C].

    The sums are products of matrices: torch's own function takes fifteen times as long on a CPU.
    """
    weights, count = (-logs).exp()[..., None], tile.shape[-1]
    total, of_squares = (tile @ weights)[..., 0], (squares @ weights.square())[..., 0]
    return (of_squares - total.square() / count).clamp_(min=0).div_(count - 1).sqrt_()


def _spread(std: Tensor) -> Tensor:
    return std.amax(-1) / std.amin(-1).clamp(min=LEAST_DIVISOR)


def quantize_reference(key: Tensor, value: Tensor, value_bits: int) -> KVarNTile:
    """Code rotated key and value [..., G, D], of any float dtype, as tiles; keys take four bits."""
    k_codes, k_scale, k_zero, k_token = _quantize_rows(key.float().transpose(-1, -2), 4)
    v_codes, v_scale, v_zero, v_channel = _quantize_rows(value.float(), value_bits)
    return KVarNTile(
        _pack_by_token(k_codes.transpose(-1, -2), 4),
        _pack_by_token(v_codes, value_bits),
        torch.stack([k_scale, k_zero, v_channel], -2).half(),
        torch.stack([k_token, v_scale, v_zero], -2).half(),
    )


def _quantize_rows(tile: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return codes uint8 [..., R, C], and fp32 each row's scale and zero [..., R], each column's scale [...,
    C].
    """
    rows, columns = normalize_reference(tile)
    normal = tile / rows[..., None] / columns[..., None, :]
    zero, largest = normal.amin(-1), normal.amax(-1)
    step = ((largest - zero) / ((1 << bits) - 1)).clamp(min=LEAST_STEP)
    codes = ((normal - zero[..., None]) / step[..., None]).round().clamp(0, (1 << bits) - 1)
    return codes.to(torch.uint8), step * rows, zero * rows, columns


def _pack_by_token(codes: Tensor, bits: int) -> Tensor:
    """Pack codes [..., G, D] into words, as in KVarNTile."""
    *outer, tokens, dim = codes.shape
    halves = fields(bits) // 4
    split = codes.reshape(*outer, halves, tokens // halves, 4, dim // 4).movedim(-4, -3)
    return pack(split.flatten(-3, -2))


def _unpack_by_token(words: Tensor, bits: int) -> Tensor:
    *outer, rows, width = words.shape
    halves = fields(bits) // 4
    split = unpack(words, bits).reshape(*outer, rows, halves, 4, width).movedim(-3, -4)
    return split.reshape(*outer, rows * halves, 4 * width)


def dequantize_reference(tile: KVarNTile) -> tuple[Tensor, Tensor]:
    """Return rotated keys and values [..., G, D], fp32."""
    channels, tokens = tile.channels.float().unbind(-2), tile.tokens.float().unbind(-2)
    k_scale, k_zero, v_channel = (x[..., None, :] for x in channels)
    k_token, v_scale, v_zero = (x[..., None] for x in tokens)
    value_bits = 4 * tile.value_words.shape[-2] // tile.key_words.shape[-2]
    # Few new tensors: on a CPU, most of the time goes into their memory.
    key = torch.addcmul(k_zero, _unpack_by_token(tile.key_words, 4).float(), k_scale).mul_(k_token)
    value_codes = _unpack_by_token(tile.value_words, value_bits).float()
    return key, torch.addcmul(v_zero, value_codes, v_scale).mul_(v_channel)
