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
        x = np.empty(group * dim, np.float32)
        scale, zero, half = np.empty(dim, np.float32), np.empty(dim, np.float32), group // 2
        for index in range(len(pages)):
            page = pages[index]
            for head in range(heads):
                by_channel, by_token = channels[page, head], tokens[page, head]
                for side in range(2):
                    words, rows = (value_words, value_rows) if side else (key_words, group)
                    flat, at = words.reshape(-1), (page * heads + head) * rows * width
                    bits = 4 * rows // group
                    widen(flat, at, 0, half, group, dim, bits, x[: half * dim], dim)
                    widen(flat, at, half, half, group, dim, bits, x[half * dim :], dim)
                    for d in range(dim):
                        scale[d] = of_half(by_channel[2 if side else 0, d])
                        zero[d] = 0 if side else of_half(by_channel[1, d])
                    to = (value if side else key).reshape(-1)
                    for token in range(group):
                        if side:
                            factor, offset = of_half(by_token[1, token]), of_half(by_token[2, token])
                        else:
                            factor, offset = of_half(by_token[0, token]), np.float32(0)
                        for d in range(0, dim, WIDTH):
                            at_x = token * dim + d
                            lanes = load(x, at_x)
                            if side:
                                lanes = fma(lanes, splat(factor), splat(offset)) * load(scale, d)
                            else:
                                lanes = fma(lanes, load(scale, d), load(zero, d)) * splat(factor)
                            store(x, at_x, lanes)
                        rotate(x, token * dim, dim)
                        for d in range(0, dim, WIDTH):
                            at_to = ((index * group + token) * heads + head) * dim + d
                            store(to, at_to, load(x, token * dim + d))

    return read_pages
