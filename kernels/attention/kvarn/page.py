"""Attention of many queries over one KVarN page; packed codes are multiplied directly; Triton.

The file `reference.py` describes a tile's layout and arithmetic:

    score[t] = k_token[t] * (sum_d (q[d] * k_scale[d]) * k_code[d, t] + sum_d q[d] * k_zero[d])
    out[d]   = v_channel[d] * (sum_t (p[t] * v_scale[t]) * v_code[t, d] + sum_t p[t] * v_zero[t])

For each page, q is multiplied once by the channels' scales and p once by the tokens' scales, for all query
heads of a group. Each pair of codes then costs one mask (`../coded/words.py`). A code has the value of code *
2^-24, so sums are scaled back at the end. Decoding, which has few queries, uses `int8_page.py`.
"""

from ...triton_imports import tl, triton
from ..coded.softmax import capped
from ..coded.words import field_of, field_weight

CODE = tl.constexpr(2.0**24)
LIFT = tl.constexpr(64.0)
"""Keeps small probabilities times small scales out of fp16's subnormal numbers."""


@triton.jit
def _pairs(ptr, COUNT: tl.constexpr):
    """Load fp16 [COUNT] in loads of four bytes, the smallest that can be prefetched a page ahead."""
    both = tl.load(ptr.to(tl.pointer_type(tl.int32)) + tl.arange(0, COUNT // 2))
    even, odd = both.to(tl.int16), (both >> 16).to(tl.int16)
    return tl.reshape(tl.join(even, odd), [COUNT]).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _with_scales(q, channels_ptr, zero_score, SLICE: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr):
    """Return q [D/4, M] times k_scale as fp16, and `zero_score` plus q times k_zero."""
    scale = _pairs(channels_ptr + SLICE * WIDTH, WIDTH) * (16.0 / field_weight(SLICE, 4))
    zero = _pairs(channels_ptr + DIM + SLICE * WIDTH, WIDTH)
    q = q.to(tl.float32)
    return (q * scale[:, None]).to(tl.float16), zero_score + q * zero[:, None]


@triton.jit
def _key_scores(q0, q1, q2, q3, words, ASM: tl.constexpr):
    """Return products [N, M] of the codes of tokens [N] with scaled queries, times 16 * 2^-24."""
    scores = tl.dot(field_of(words, 0, 4, ASM), q0)
    scores = tl.dot(field_of(words, 1, 4, ASM), q1, scores)
    scores = tl.dot(field_of(words, 2, 4, ASM), q2, scores)
    return tl.dot(field_of(words, 3, 4, ASM), q3, scores)


@triton.jit
def _value_sum(
    acc, low, high, words, more_words, rescale, zero_sum, channels_ptr,
    SLICE: tl.constexpr, VALUE_BITS: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Add one slice of the page's values to acc [D/4, M]; `low` and `high` are p of its two halves."""
    channel = _pairs(channels_ptr + 2 * DIM + SLICE * WIDTH, WIDTH)
    values = tl.dot(field_of(words, SLICE, VALUE_BITS, ASM), low)
    if VALUE_BITS == 2:
        values = tl.dot(field_of(words, 4 + SLICE, VALUE_BITS, ASM), high, values)
    else:
        values = tl.dot(field_of(more_words, SLICE, VALUE_BITS, ASM), high, values)
    values = values * (CODE / LIFT / field_weight(SLICE, VALUE_BITS)) + zero_sum[None, :]
    return acc * rescale[None, :] + values * channel[:, None]


@triton.jit
def attend_page(
    q, acc, largest, total,
    tile, words_k_ptr, words_v_ptr, channels_ptr, tokens_ptr, is_seen, scale_log2, softcap,
    VALUE_BITS: tl.constexpr, GROUP_SIZE: tl.constexpr, DIM: tl.constexpr, SOFTCAP: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """Attend to tile number `tile`, int64, for the queries [M] for which `is_seen` is true.

    q, acc: four slices [D/4, M] each, fp16 and fp32. After this page, every query must have attended to at
            least one key.
    """
    q0, q1, q2, q3 = q
    acc0, acc1, acc2, acc3 = acc
    WIDTH: tl.constexpr = DIM // 4
    HALF: tl.constexpr = GROUP_SIZE // 2
    token = tl.arange(0, HALF)
    at = token[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    words_k_ptr += tile * GROUP_SIZE * WIDTH
    words_v_ptr += tile * (GROUP_SIZE * VALUE_BITS // 4) * WIDTH
    channels_ptr += tile * 3 * DIM
    tokens_ptr += tile * 3 * GROUP_SIZE + token
    low_words = tl.load(words_k_ptr + at, eviction_policy="evict_first")
    high_words = tl.load(words_k_ptr + at + HALF * WIDTH, eviction_policy="evict_first")
    # As columns already here: a transposition between a load and its product would go through shared memory.
    across = token[None, :] * WIDTH + tl.arange(0, WIDTH)[:, None]
    words = tl.load(words_v_ptr + across, eviction_policy="evict_first")
    more_words = words
    if VALUE_BITS == 4:
        more_words = tl.load(words_v_ptr + across + HALF * WIDTH, eviction_policy="evict_first")

    zero_score = tl.zeros([WIDTH, q0.shape[1]], tl.float32)
    s0, zero_score = _with_scales(q0, channels_ptr, zero_score, 0, WIDTH, DIM)
    s1, zero_score = _with_scales(q1, channels_ptr, zero_score, 1, WIDTH, DIM)
    s2, zero_score = _with_scales(q2, channels_ptr, zero_score, 2, WIDTH, DIM)
    s3, zero_score = _with_scales(q3, channels_ptr, zero_score, 3, WIDTH, DIM)
    zero = tl.sum(zero_score, axis=0)[None, :]
    low_scale = tl.load(tokens_ptr).to(tl.float32) * scale_log2
    high_scale = tl.load(tokens_ptr + HALF).to(tl.float32) * scale_log2
    low = (_key_scores(s0, s1, s2, s3, low_words, ASM) * (CODE / 16.0) + zero) * low_scale[:, None]
    high = (_key_scores(s0, s1, s2, s3, high_words, ASM) * (CODE / 16.0) + zero) * high_scale[:, None]
    low, high = capped(low, softcap, SOFTCAP), capped(high, softcap, SOFTCAP)
    low = tl.where(is_seen[None, :], low, -float("inf"))
    high = tl.where(is_seen[None, :], high, -float("inf"))

    new_largest = tl.maximum(largest, tl.max(tl.maximum(low, high), axis=0))
    rescale = tl.exp2(largest - new_largest)
    low = tl.exp2(low - new_largest[None, :])
    high = tl.exp2(high - new_largest[None, :])
    total = total * rescale + tl.sum(low + high, axis=0)
    low_zero = tl.load(tokens_ptr + 2 * GROUP_SIZE).to(tl.float32)
    high_zero = tl.load(tokens_ptr + 2 * GROUP_SIZE + HALF).to(tl.float32)
    zero_sum = tl.sum(low * low_zero[:, None] + high * high_zero[:, None], axis=0)
    low *= tl.load(tokens_ptr + GROUP_SIZE).to(tl.float32)[:, None] * LIFT
    high *= tl.load(tokens_ptr + GROUP_SIZE + HALF).to(tl.float32)[:, None] * LIFT
    low, high = low.to(tl.float16), high.to(tl.float16)
    acc0 = _value_sum(
        acc0, low, high, words, more_words, rescale, zero_sum, channels_ptr, 0, VALUE_BITS, WIDTH, DIM, ASM
    )
    acc1 = _value_sum(
        acc1, low, high, words, more_words, rescale, zero_sum, channels_ptr, 1, VALUE_BITS, WIDTH, DIM, ASM
    )
    acc2 = _value_sum(
        acc2, low, high, words, more_words, rescale, zero_sum, channels_ptr, 2, VALUE_BITS, WIDTH, DIM, ASM
    )
    acc3 = _value_sum(
        acc3, low, high, words, more_words, rescale, zero_sum, channels_ptr, 3, VALUE_BITS, WIDTH, DIM, ASM
    )
    return acc0, acc1, acc2, acc3, new_largest, total
