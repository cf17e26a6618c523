"""KVarN's pages on a CPU, all heads of them: coded from keys and values as they came, and read; in numba.

Not for attention, which multiplies codes as they are (`kvarn_decode_cpu.py`). Arrays are as there.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from .kvarn_tile_cpu import code_tile, of_half, rotate, to_half, widen
from .lanes import WIDTH, fma, load, splat, store


def code_page(sources: str) -> Callable[..., None]:
    """sources: a digest of what is compiled into it, as in `kvarn_cpu.py`; so are those below."""

    def code_page(
        key: Any, value: Any, key_at: int, value_at: int, head_stride: int, token_stride: int, page: int,
        key_words: Any, value_words: Any, channels: Any, tokens: Any,
    ) -> None:  # fmt: skip
        """Code `page`. key, value: of the model, flat, its first ones at key_at and value_at"""
        _ = sources
        heads, group, width = key_words.shape[1:]
        dim, value_rows = 4 * width, value_words.shape[2]
        x = np.empty(group * dim, np.float32)
        for tile in range(2 * heads):
            head, of_keys = tile // 2, tile % 2 == 0
            numbers, begin = (key, key_at) if of_keys else (value, value_at)
            for token in range(group):
                for d in range(0, dim, WIDTH):
                    at = begin + head * head_stride + token * token_stride + d
                    store(x, token * dim + d, load(numbers, at))
                rotate(x, token * dim, dim)
            for one in range(group * dim):
                x[one] = of_half(to_half(x[one]))
            by_channel, by_token = channels[page, head], tokens[page, head]
            words, rows = (key_words, group) if of_keys else (value_words, value_rows)
            code_tile(
                x,
                words.reshape(-1),
                (page * heads + head) * rows * width,
                4 if of_keys else 4 * value_rows // group,
                of_keys,
                by_channel[0] if of_keys else by_token[1],
                by_channel[1] if of_keys else by_token[2],
                by_token[0] if of_keys else by_channel[2],
            )

    return code_page


def read_pages(sources: str) -> Callable[..., None]:
    def read_pages(
        pages: Any, key: Any, value: Any, key_words: Any, value_words: Any, channels: Any, tokens: Any
    ) -> None:
        """Write keys and values of pages int32 [n], no longer rotated, to key and value [n * G, H_kv, D]."""
        _ = sources
        heads, group, width = key_words.shape[1:]
        dim, value_rows = 4 * width, value_words.shape[2]
        x, half, of_channels = np.empty(group * dim, np.float32), group // 2, channels.reshape(-1)
        for tile in range(2 * heads * len(pages)):
            index, head, of_keys = tile // (2 * heads), tile // 2 % heads, tile % 2 == 0
            page = pages[index]
            words, rows = (key_words, group) if of_keys else (value_words, value_rows)
            flat, at = words.reshape(-1), (page * heads + head) * rows * width
            widen(flat, at, 0, half, group, dim, 4 * rows // group, x[: half * dim], dim)
            widen(flat, at, half, half, group, dim, 4 * rows // group, x[half * dim :], dim)
            to, scales = (key if of_keys else value).reshape(-1), (page * heads + head) * 3 * dim
            for token in range(group):
                scale = splat(of_half(tokens[page, head, 0 if of_keys else 1, token]))
                zero = splat(of_half(tokens[page, head, 2, token]))
                for d in range(0, dim, WIDTH):
                    code = load(x, token * dim + d)
                    if of_keys:
                        of_channel = load(of_channels, scales + d), load(of_channels, scales + dim + d)
                        store(x, token * dim + d, fma(code, of_channel[0], of_channel[1]) * scale)
                    else:
                        by = load(of_channels, scales + 2 * dim + d)
                        store(x, token * dim + d, fma(code, scale, zero) * by)
                rotate(x, token * dim, dim)
                for d in range(0, dim, WIDTH):
                    store(to, ((index * group + token) * heads + head) * dim + d, load(x, token * dim + d))

    return read_pages
