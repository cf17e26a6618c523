"""KVarN's whole pages on a CPU, written from plain keys and values, and read back; in numba.

Attention, which multiplies packed codes, is in `decode.py`, which also describes the arrays.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from .lanes import WIDTH, fma, load, splat, store
from .tile import code_tile, of_half, pages_of, rotate, to_half, widen


def code_page(sources: str) -> Callable[..., None]:
    """sources: a digest of all source code that is compiled into it, as in `compiled.py`; the same holds for
    the functions below.
    """

    def code_page(
        key: Any, value: Any, key_at: int, value_at: int, head_stride: int, token_stride: int, page: int,
        key_words: Any, value_words: Any, channels: Any, tokens: Any,
    ) -> None:  # fmt: skip
        """Code `page`. key, value: the model's, flat; the page's first numbers are at key_at and value_at"""
        _ = sources
        pages = pages_of(key_words, value_words, channels, tokens)
        heads, group, dim = pages.heads, pages.group, pages.dim
        x = np.empty(group * dim, np.float32)
        for half in range(2 * heads):
            head, of_keys = half // 2, half % 2 == 0
            numbers, begin = (key, key_at) if of_keys else (value, value_at)
            for token in range(group):
                for d in range(0, dim, WIDTH):
                    at = begin + head * head_stride + token * token_stride + d
                    store(x, token * dim + d, load(numbers, at))
                rotate(x, token * dim, dim)
            for index in range(group * dim):
                x[index] = of_half(to_half(x[index]))
            by_channel, by_token = channels[page, head], tokens[page, head]
            words, bits = (pages.key_words, 4) if of_keys else (pages.value_words, pages.value_bits)
            code_tile(
                x,
                words,
                (page * heads + head) * group * dim * bits // 16,
                bits,
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
        stored = pages_of(key_words, value_words, channels, tokens)
        heads, group, dim = stored.heads, stored.group, stored.dim
        x, half = np.empty(group * dim, np.float32), group // 2
        for task in range(2 * heads * len(pages)):
            index, head, of_keys = task // (2 * heads), task // 2 % heads, task % 2 == 0
            tile, to = pages[index] * heads + head, (key if of_keys else value).reshape(-1)
            widen(stored, tile, of_keys, 0, half, x[: half * dim], dim)
            widen(stored, tile, of_keys, half, half, x[half * dim :], dim)
            of_channels, of_tokens = tile * 3 * dim, tile * 3 * group
            for token in range(group):
                scale = splat(of_half(stored.tokens[of_tokens + token + (0 if of_keys else group)]))
                zero = splat(of_half(stored.tokens[of_tokens + token + 2 * group]))
                for d in range(0, dim, WIDTH):
                    code, at = load(x, token * dim + d), of_channels + d
                    if of_keys:
                        code = fma(code, load(stored.channels, at), load(stored.channels, at + dim)) * scale
                    else:
                        code = fma(code, scale, zero) * load(stored.channels, at + 2 * dim)
                    store(x, token * dim + d, code)
                rotate(x, token * dim, dim)
                for d in range(0, dim, WIDTH):
                    store(to, ((index * group + token) * heads + head) * dim + d, load(x, token * dim + d))

    return read_pages
