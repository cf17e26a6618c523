"""Attention over one KVarN page by integer products, for a few queries at a time; Triton.

The formulas are those of `page.py`, whose matrix units multiply codes as fp16 numbers. A group of four query
heads fills only half of their eight columns, so in this file each head takes two columns: queries times
k_scale and probabilities times v_scale become 16-bit integers, relative to the largest of the head and page.
One column has the high bytes, the other the low bytes. Codes are bytes: one mask yields four codes, half as
many products are needed, and the softmax covers only the group's own heads.

    column 2h, 2h + 1      x = (256 * high + low) * unit, both signed; sums over either are exact, int32
    codes highest in a byte   (byte & mask) ^ 0x80 = (code - half of their range) * 2^shift, as a signed byte

The zero points make up for centering: they add half of the range times the sum of queries or probabilities.
Key codes in the lowest bits of a byte are centered by a product with -8, so that no large terms of codes and
k_zero cancel.
"""

from ...triton_imports import constexpr_function, tl, triton
from ..coded.softmax import capped

UNITS = tl.constexpr(16192.0)
"""Of these, a power of two has so many: twice as many and rounding still fit in the 16 bits."""
TO_INTEGER = tl.constexpr(1.5 * 2.0**23)
"""Added to fp32, leaves the nearest integer in its low bits."""
ROUND = tl.constexpr(128)
"""Added to that, makes the high byte of a number whose low byte is signed; turns the low byte's sign."""
LEAST = tl.constexpr(1e-30)
CENTER = tl.constexpr(8)
"""Of four bits."""
QUERY_ASM = tl.constexpr(
    "{.reg .b32 s, t; prmt.b32 s, $1, $2, $5; prmt.b32 t, $3, $4, $5; prmt.b32 $0, s, t, 0x5410;}"
)
"""Of four numbers, the bytes that $5 selects of two: 0x51, the high ones; 0x40, the low ones."""
PROBABILITY_ASM = tl.constexpr(
    "{.reg .b32 s, t, u; prmt.b32 s, $2, $3, 0x5140; prmt.b32 t, $4, $5, 0x5140; "
    "prmt.b32 $0, s, t, 0x7632; prmt.b32 u, s, t, 0x5410; xor.b32 $1, u, 0x80808080;}"
)
"""Of four numbers that ROUND was added to, the high bytes and the low ones."""


@constexpr_function
def _shift(field: int, bits: int) -> int:
    """Return the position of a field's codes in their byte."""
    return field * bits % 8


@constexpr_function
def _is_highest(field: int, bits: int) -> bool:
    return _shift(field, bits) + bits == 8


@constexpr_function
def _mask_asm(field: int, bits: int) -> str:
    """Return PTX that masks the register t, shifted if the field needs it, and leaves the codes in the
    result.
    """
    mask = ((1 << bits) - 1 << _shift(field, bits)) * 0x01010101
    if _is_highest(field, bits):
        return f"lop3.b32 $0, t, {mask}, 0x80808080, 0x6A;"  # (t & mask) ^ 0x80 of each byte
    return f"and.b32 $0, t, {mask};"


@constexpr_function
def _nibbles_asm(field: int) -> str:
    return f"{{.reg .b32 t; mov.b32 t, $1; {_mask_asm(field, 4)}}}"


@constexpr_function
def _of_words_asm(field: int, bits: int) -> str:
    """Of four words."""
    select = "0x7531" if field * bits >= 8 else "0x6420"
    return f"{{.reg .b32 t; prmt.b32 t, $1, $2, {select}; {_mask_asm(field, bits)}}}"


@triton.jit
def _masked(x, FIELD: tl.constexpr, BITS: tl.constexpr):
    """Return the lowest byte of x as int8."""
    codes = x & (((1 << BITS) - 1) << _shift(FIELD, BITS))
    if _is_highest(FIELD, BITS):
        codes = codes ^ 0x80
    return codes.to(tl.int8)


@triton.jit
def _nibbles(x, FIELD: tl.constexpr, ASM: tl.constexpr):
    """Return the codes of bytes as int8: for half 0 the low codes, for half 1 the high codes less 8, times
    16.
    """
    if ASM:
        asm: tl.constexpr = _nibbles_asm(FIELD)
        return tl.inline_asm_elementwise(asm, "=r,r", [x], dtype=tl.int8, is_pure=True, pack=4)
    return _masked(x.to(tl.int32), FIELD, 4)


@triton.jit
def _codes(words, FIELD: tl.constexpr, BITS: tl.constexpr, ASM: tl.constexpr):
    """Return the codes in field FIELD of int16 words as int8, times 2^_shift; the highest codes of a byte are
    centered.
    """
    if ASM:
        asm: tl.constexpr = _of_words_asm(FIELD, BITS)
        return tl.inline_asm_elementwise(asm, "=r,r,r", [words], dtype=tl.int8, is_pure=True, pack=4)
    return _masked(words.to(tl.int32) >> (FIELD * BITS // 8 * 8), FIELD, BITS)


@triton.jit
def _slices(ptr, DIM: tl.constexpr):
    """Load fp16 [D] as its four slices. Only views follow the load, so the compiler moves the load to its
    first use.
    """
    x = tl.permute(tl.reshape(tl.load(ptr + tl.arange(0, DIM)), [4, DIM // 4]), [1, 0])
    even, odd = tl.split(tl.reshape(x, [DIM // 4, 2, 2]))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def _halves(ptr, COUNT: tl.constexpr):
    """Load fp16 [COUNT] as its two halves, fp32."""
    x = tl.load(ptr + tl.arange(0, COUNT))
    low, high = tl.split(tl.permute(tl.reshape(x, [2, COUNT // 2]), [1, 0]))
    return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def _centered_product(q, zero, scale):
    """Multiply q by the zero points [N] of centered codes: fp32 [N, M]."""
    return q.to(tl.float32) * (zero.to(tl.float32) + CENTER * scale.to(tl.float32))[:, None]


@triton.jit
def _unit(largest):
    """Return two fp32 numbers: the largest power of two up to `largest`, and UNITS divided by it."""
    power = largest.to(tl.float32) + LEAST
    bits = power.to(tl.int32, bitcast=True) & 0x7F800000
    return bits.to(tl.float32, bitcast=True), (0x7F000000 - bits).to(tl.float32, bitcast=True) * UNITS


@triton.jit
def _interleaved(x, y):
    """Interleave [N, M] of even and of odd rows to [2N, M]."""
    return tl.reshape(tl.permute(tl.join(x, y), [0, 2, 1]), [2 * x.shape[0], x.shape[1]])


@triton.jit
def _query_bytes(x, ASM: tl.constexpr):
    """Split fp32 [N, M] in units into int8: high bytes in even columns, low bytes in odd columns."""
    is_high = (tl.arange(0, x.shape[1]) % 2 == 0)[None, :]
    bits = (x + tl.where(is_high, TO_INTEGER + ROUND, TO_INTEGER)).to(tl.int32, bitcast=True)
    if ASM:
        select = tl.where(is_high, 0x51, 0x40)
        return tl.inline_asm_elementwise(
            QUERY_ASM, "=r,r,r,r,r,r,r,r,r", [bits, select], dtype=tl.int8, is_pure=True, pack=4
        )
    return tl.where(is_high, bits >> 8, bits).to(tl.int8)


@triton.jit
def _probability_bytes(x, ASM: tl.constexpr):
    """Split fp32 [N, H] in units into int8 [N, 2H], as `_query_bytes` does; tokens are in the order of
    `_token_order`.
    """
    bits = (x + (TO_INTEGER + ROUND)).to(tl.int32, bitcast=True)
    if ASM:
        high, low = tl.inline_asm_elementwise(
            PROBABILITY_ASM, "=r,=r,r,r,r,r", [bits], dtype=(tl.int8, tl.int8), is_pure=True, pack=4
        )
    else:
        high, low = (bits >> 8).to(tl.int8), (bits ^ ROUND).to(tl.int8)
    COUNT: tl.constexpr = x.shape[0]
    both = tl.join(high, low)
    if COUNT >= 32:
        both = tl.permute(tl.reshape(both, [COUNT // 32, 4, 8, x.shape[1], 2]), [0, 2, 1, 3, 4])
    return tl.reshape(both, [COUNT, 2 * x.shape[1]])


@triton.jit
def _token_order(COUNT: tl.constexpr):
    """Return int32 [COUNT]: the order of a product's rows in which the four tokens whose scores one thread
    has are eight apart.
    """
    at = tl.arange(0, COUNT)
    if COUNT >= 32:
        at = at // 32 * 32 + at % 4 * 8 + at % 32 // 4
    return at


@triton.jit
def _wholes(sums):
    """Join int32 [N, 2H], sums over high and over low bytes, to fp32 [N, H]. Sums over 256 channels or tokens
    stay below 2^31.
    """
    high, low = tl.split(tl.reshape(sums, [sums.shape[0], sums.shape[1] // 2, 2]))
    return (high * 256 + low).to(tl.float32)


@triton.jit
def _of_heads(x):
    """Reduce [2H], which has each head's number twice, to [H]."""
    x, _ = tl.split(tl.reshape(x, [x.shape[0] // 2, 2]))
    return x


@triton.jit
def _key_scores(bytes_k, center, even, odd, ASM: tl.constexpr):
    """Return fp32 [N, H]: products of the centered codes of tokens [N], 16 times as large."""
    sums = tl.dot(_nibbles(bytes_k, 0, ASM), even, center, out_dtype=tl.int32)
    return _wholes(tl.dot(_nibbles(bytes_k, 1, ASM), odd, sums * 16, out_dtype=tl.int32))


@triton.jit
def _value_sum(
    acc, low, high, words, more_words, rescale, unit, zero_sum, weight_sum, channel,
    SLICE: tl.constexpr, VALUE_BITS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Add one slice of the page's values to acc [D/4, H]; `low` and `high` are p of its two halves."""
    sums = tl.dot(_codes(words, SLICE, VALUE_BITS, ASM), low)
    if VALUE_BITS == 2:
        sums = tl.dot(_codes(words, 4 + SLICE, VALUE_BITS, ASM), high, sums, out_dtype=tl.int32)
    else:
        sums = tl.dot(_codes(more_words, SLICE, VALUE_BITS, ASM), high, sums, out_dtype=tl.int32)
    if _is_highest(SLICE, VALUE_BITS):
        zero_sum += weight_sum * (1 << (VALUE_BITS - 1))
    values = _wholes(sums) * (unit / (1 << _shift(SLICE, VALUE_BITS)))[None, :] + zero_sum[None, :]
    return acc * rescale[None, :] + values * channel.to(tl.float32)[:, None]


@triton.jit
def attend_page_int8(
    q, acc, largest, total,
    tile, words_k_ptr, words_v_ptr, channels_ptr, tokens_ptr, scale_log2, softcap,
    VALUE_BITS: tl.constexpr, GROUP_SIZE: tl.constexpr, DIM: tl.constexpr, SOFTCAP: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """Attend to tile number `tile`, int64, which all heads [H] see.

    q:   four slices, fp16 [D/4, 2H], each head in two columns
    acc: fp32 [D/4, H]. Matrix units add up 32 bytes at least, so pages have 64 tokens or more, and heads 64
         channels.
    """
    q0, q1, q2, q3 = q
    acc0, acc1, acc2, acc3 = acc
    WIDTH: tl.constexpr = DIM // 4
    HALF: tl.constexpr = GROUP_SIZE // 2
    bytes_k_ptr = words_k_ptr.to(tl.pointer_type(tl.int8)) + tile * (GROUP_SIZE * 2 * WIDTH)
    words_v_ptr += tile * (GROUP_SIZE * VALUE_BITS // 4) * WIDTH
    channels_ptr += tile * 3 * DIM
    tokens_ptr += tile * 3 * GROUP_SIZE
    at = tl.arange(0, HALF)[:, None] * (2 * WIDTH) + tl.arange(0, 2 * WIDTH)[None, :]
    low_bytes = tl.load(bytes_k_ptr + at, eviction_policy="evict_first")
    high_bytes = tl.load(bytes_k_ptr + at + HALF * 2 * WIDTH, eviction_policy="evict_first")
    # As columns already here: a transposition between a load and its product would go through shared memory.
    across = _token_order(HALF)[None, :] * WIDTH + tl.arange(0, WIDTH)[:, None]
    words = tl.load(words_v_ptr + across, eviction_policy="evict_first")
    more_words = words
    if VALUE_BITS == 4:
        more_words = tl.load(words_v_ptr + across + HALF * WIDTH, eviction_policy="evict_first")

    c0, c1, c2, c3 = _slices(channels_ptr, DIM)
    z0, z1, z2, z3 = _slices(channels_ptr + DIM, DIM)
    # In fp32: zero points can be far larger than what codes count, as where keys have a bias.
    zero = _centered_product(q0, z0, c0) + _centered_product(q1, z1, c1)
    zero += _centered_product(q2, z2, c2) + _centered_product(q3, z3, c3)
    zero = _of_heads(tl.sum(zero, axis=0)) * scale_log2
    s0, s1, s2, s3 = q0 * c0[:, None], q1 * c1[:, None], q2 * c2[:, None], q3 * c3[:, None]
    size = tl.maximum(tl.maximum(tl.abs(s0), tl.abs(s1)), tl.maximum(tl.abs(s2), tl.abs(s3)))
    power, per_unit = _unit(tl.max(size, axis=0))
    # A word's bytes hold slices 0 and 1, 2 and 3, which are the even and the odd rows of products.
    even = _interleaved(s0.to(tl.float32) * per_unit[None, :], s2.to(tl.float32) * per_unit[None, :])
    odd = _interleaved(s1.to(tl.float32) * per_unit[None, :], s3.to(tl.float32) * per_unit[None, :])
    even, odd = _query_bytes(even, ASM), _query_bytes(odd, ASM)
    center = tl.dot(tl.full([HALF, 2 * WIDTH], -CENTER, tl.int8), even)
    unit = _of_heads(power) * (scale_log2 / UNITS / 16)
    low = _key_scores(low_bytes, center, even, odd, ASM) * unit[None, :] + zero[None, :]
    high = _key_scores(high_bytes, center, even, odd, ASM) * unit[None, :] + zero[None, :]
    low_scale, high_scale = _halves(tokens_ptr, GROUP_SIZE)
    low = capped(low * low_scale[:, None], softcap, SOFTCAP)
    high = capped(high * high_scale[:, None], softcap, SOFTCAP)

    # Probabilities under the page's own largest score, so that none is too small for its unit.
    page_largest = tl.max(tl.maximum(low, high), axis=0)
    new_largest = tl.maximum(largest, page_largest)
    rescale = tl.exp2(largest - new_largest)
    page_scale = tl.exp2(page_largest - new_largest)
    low = tl.exp2(low - page_largest[None, :])
    high = tl.exp2(high - page_largest[None, :])
    total = total * rescale + tl.sum(low + high, axis=0) * page_scale
    low_zero, high_zero = _halves(tokens_ptr + 2 * GROUP_SIZE, GROUP_SIZE)
    zero_sum = tl.sum(low * low_zero[:, None] + high * high_zero[:, None], axis=0) * page_scale
    low_scale, high_scale = _halves(tokens_ptr + GROUP_SIZE, GROUP_SIZE)
    low *= low_scale[:, None]
    high *= high_scale[:, None]
    weight_sum = tl.sum(low + high, axis=0) * page_scale
    power, per_unit = _unit(tl.max(tl.maximum(low, high), axis=0))
    unit = power * (page_scale / UNITS)
    low = _probability_bytes(low * per_unit[None, :], ASM)
    high = _probability_bytes(high * per_unit[None, :], ASM)
    v0, v1, v2, v3 = _slices(channels_ptr + 2 * DIM, DIM)
    acc0 = _value_sum(
        acc0, low, high, words, more_words, rescale, unit, zero_sum, weight_sum, v0, 0, VALUE_BITS, ASM
    )
    acc1 = _value_sum(
        acc1, low, high, words, more_words, rescale, unit, zero_sum, weight_sum, v1, 1, VALUE_BITS, ASM
    )
    acc2 = _value_sum(
        acc2, low, high, words, more_words, rescale, unit, zero_sum, weight_sum, v2, 2, VALUE_BITS, ASM
    )
    acc3 = _value_sum(
        acc3, low, high, words, more_words, rescale, unit, zero_sum, weight_sum, v3, 3, VALUE_BITS, ASM
    )
    return acc0, acc1, acc2, acc3, new_largest, total
