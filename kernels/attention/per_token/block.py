"""Attention over a block of int4 or NVFP4 tokens, codes multiplied as they are packed; Triton.

The scales and zeros of int4 (`int4.py`) belong to whole tokens, so products use bare codes:

    score[t] = k_scale[t] * sum_d q[d] * k_code[d, t] + k_zero[t] * sum_d q[d]
    out[d]   = sum_t (p[t] * v_scale[t]) * v_code[t, d] + sum_t p[t] * v_zero[t]

NVFP4's scales change along a token, so codes are multiplied by them first: E2M1 times E4M3 has six
significant bits, which fit in fp16. E2M1's bits, moved to fp16's positions, are 2^-14 times the value.
"""

from ...triton_imports import constexpr_function, tl, triton
from ..coded.softmax import capped, dot4
from ..coded.words import field_of, field_weight
from .nvfp4 import MAGNITUDE_SHIFTS, SIGN_SHIFTS

CODE = tl.constexpr(2.0**24)
LIFT = tl.constexpr(64.0)
"""Keeps small probabilities times small scales out of fp16's subnormal numbers."""
BALANCE = tl.constexpr(4.0)
"""Queries of fields that weigh 16 are divided by it, the others multiplied."""
E2M1 = tl.constexpr(2.0**14)


@constexpr_function
def _e2m1_asm(field: int) -> str:
    """Return PTX that extracts one field's values from two words. If two shifts are needed, one
    multiplication makes both; the other bits of the product never carry into the result.
    """
    sign, magnitude = SIGN_SHIFTS[field], MAGNITUDE_SHIFTS[field]
    if sign == magnitude:
        return f"{{.reg .b32 t; shl.b32 t, $1, {sign}; and.b32 $0, t, 0x8E008E00;}}"
    own = ((0x8000 >> sign) | (0x0E00 >> magnitude)) * 0x10001
    return (
        f"{{.reg .b32 t; and.b32 t, $1, {own}; mul.lo.u32 t, t, {(1 << sign) + (1 << magnitude)}; "
        "and.b32 $0, t, 0x8E008E00;}"
    )


@constexpr_function
def _sign_shift(field: int) -> int:
    return SIGN_SHIFTS[field]


@constexpr_function
def _magnitude_shift(field: int) -> int:
    return MAGNITUDE_SHIFTS[field]


@triton.jit
def e2m1(words, FIELD: tl.constexpr, ASM: tl.constexpr):
    """Return fp16 of the shape of int16 `words`: field FIELD's value times 2^-14."""
    if ASM:
        asm: tl.constexpr = _e2m1_asm(FIELD)
        return tl.inline_asm_elementwise(asm, "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2)
    wide = words.to(tl.int32)
    bits = ((wide << _sign_shift(FIELD)) & 0x8000) | ((wide << _magnitude_shift(FIELD)) & 0x0E00)
    return bits.to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def first_channels(DIM: tl.constexpr, NVFP4: tl.constexpr):
    """Return int32 [D/4]: the channel of each word's first code. The channels of a word's other codes follow
    D/16 (NVFP4) or D/4 (int4) apart.
    """
    word = tl.arange(0, DIM // 4)
    if NVFP4:
        word = word % 8 // 2 * (DIM // 4) + word // 16 * 4 + word % 16 // 8 * 2 + word % 2
    return word


@triton.jit
def _scales_of(scales_ptr, slot, keep):
    """Load a token's scale and zero, fp32 [N] each: one load of four bytes, which can be in flight ahead."""
    both = tl.load(scales_ptr + slot, mask=keep, other=0)
    scale = both.to(tl.int16).to(tl.float16, bitcast=True)
    zero = (both >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    return scale.to(tl.float32), zero.to(tl.float32)


@triton.jit
def _quarters(scales_ptr, slot, keep, DIM: tl.constexpr):
    """Load the D/64 scales of each word's quarter of the head, for tokens [N], as one integer.

    Only views follow the load, so Triton loads each number directly into the thread that multiplies by it.
    """
    at = slot[:, None] * 4 + tl.arange(0, 4)[None, :]
    scales = tl.load(scales_ptr + at, mask=keep[:, None], other=0)
    scales = tl.reshape(scales, [slot.shape[0], 1, 1, 4, 1])
    wide = tl.broadcast_to(scales, [slot.shape[0], DIM // 64, 2, 4, 2])
    return tl.reshape(wide, [slot.shape[0], DIM // 4])


@constexpr_function
def _e4m3_asm(byte: int, dim: int) -> str:
    """Return the given byte of two integers of 16 or of 32 bits."""
    inputs, select = ("$1, 0", f"0x00{2 + byte}{byte}") if dim == 128 else ("$1, $2", f"0x00{4 + byte}{byte}")
    return (
        f"{{.reg .b32 t; .reg .b16 a, b; prmt.b32 t, {inputs}, {select}; "
        "mov.b32 {a, b}, t; cvt.rn.f16x2.e4m3x2 $0, a;}"
    )


@triton.jit
def _scaled(words, scales, FIELD: tl.constexpr, DIM: tl.constexpr, ASM: tl.constexpr):
    """Return fp16 of the shape of int16 `words`: field FIELD's value times 2^-14 under its scale, exactly.

    The least product is 2^-24, the least fp16 number. scales: `_quarters` of the same shape
    """
    BYTE: tl.constexpr = FIELD * (DIM // 64) // 4
    if ASM and DIM > 64:
        asm: tl.constexpr = _e4m3_asm(BYTE, DIM)
        scale = tl.inline_asm_elementwise(
            asm, "=r,r" if DIM == 128 else "=r,r,r", [scales], dtype=tl.float16, is_pure=True, pack=2
        )
    else:
        scale = (scales >> (8 * BYTE)).to(tl.int8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    return e2m1(words, FIELD, ASM) * scale


@triton.jit
def prepared(q0, q1, q2, q3, NVFP4: tl.constexpr):
    """Return queries fp16 [D/4, M] for `attend_block`, and fp32 [M], the queries' sums along all channels."""
    f0, f1, f2, f3 = q0.to(tl.float32), q1.to(tl.float32), q2.to(tl.float32), q3.to(tl.float32)
    total = tl.sum(f0 + f1 + f2 + f3, axis=0)
    if not NVFP4:
        f0, f1, f2, f3 = f0 * BALANCE, f1 / BALANCE, f2 * BALANCE, f3 / BALANCE
    return f0.to(tl.float16), f1.to(tl.float16), f2.to(tl.float16), f3.to(tl.float16), total


@triton.jit
def attend_block(
    q, q_sum, acc, zeros, largest, total,
    slot, keep, visible, words_k_ptr, words_v_ptr, scales_k_ptr, scales_v_ptr, scale_log2, softcap,
    NVFP4: tl.constexpr, DIM: tl.constexpr, SOFTCAP: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Attend to the tokens that lie in `slot`, int64 [N], where `keep` is true; `visible` [N, 1 or M].

    q, acc: their four slices, fp16 and fp32 [D/4, M]; `finished` computes results from acc. zeros: fp32 [M],
            the sum that zero points add to every channel
    """
    q0, q1, q2, q3 = q
    acc0, acc1, acc2, acc3 = acc
    word = tl.arange(0, DIM // 4)
    at = slot[:, None] * (DIM // 4) + word[None, :]
    # Values as columns already here: a transposition before their product would go through shared memory.
    across = slot[None, :] * (DIM // 4) + word[:, None]
    words_k = tl.load(words_k_ptr + at, mask=keep[:, None], other=0, eviction_policy="evict_first")
    words_v = tl.load(words_v_ptr + across, mask=keep[None, :], other=0, eviction_policy="evict_first")
    if NVFP4:
        key_scales = _quarters(scales_k_ptr, slot, keep, DIM)
        scores = dot4(
            _scaled(words_k, key_scales, 0, DIM, ASM), _scaled(words_k, key_scales, 1, DIM, ASM),
            _scaled(words_k, key_scales, 2, DIM, ASM), _scaled(words_k, key_scales, 3, DIM, ASM),
            q0, q1, q2, q3,
        )  # fmt: skip
        scores *= scale_log2 * E2M1
    else:
        scores = dot4(
            field_of(words_k, 0, 4, ASM), field_of(words_k, 1, 4, ASM),
            field_of(words_k, 2, 4, ASM), field_of(words_k, 3, 4, ASM),
            q0, q1, q2, q3,
        )  # fmt: skip
        key_scale, key_zero = _scales_of(scales_k_ptr, slot, keep)
        scores = scores * (key_scale * (CODE / BALANCE))[:, None] + q_sum[None, :] * key_zero[:, None]
        scores *= scale_log2
    scores = tl.where(visible, capped(scores, softcap, SOFTCAP), -float("inf"))
    new_largest = tl.maximum(largest, tl.max(scores, axis=0))
    # A query whose window begins further on has seen nothing yet.
    pivot = tl.where(new_largest == -float("inf"), 0.0, new_largest)
    rescale = tl.exp2(largest - pivot)
    probability = tl.exp2(scores - pivot[None, :])
    total = total * rescale + tl.sum(probability, axis=0)
    if NVFP4:
        weight = probability.to(tl.float16)
        value_scales = _quarters(scales_v_ptr, slot, keep, DIM).T
        v0, v1 = _scaled(words_v, value_scales, 0, DIM, ASM), _scaled(words_v, value_scales, 1, DIM, ASM)
        v2, v3 = _scaled(words_v, value_scales, 2, DIM, ASM), _scaled(words_v, value_scales, 3, DIM, ASM)
    else:
        value_scale, value_zero = _scales_of(scales_v_ptr, slot, keep)
        zeros = zeros * rescale + tl.sum(probability * value_zero[:, None], axis=0)
        weight = (probability * (value_scale * LIFT)[:, None]).to(tl.float16)
        v0, v1 = field_of(words_v, 0, 4, ASM), field_of(words_v, 1, 4, ASM)
        v2, v3 = field_of(words_v, 2, 4, ASM), field_of(words_v, 3, 4, ASM)
    acc0 = tl.dot(v0, weight, acc0 * rescale[None, :])
    acc1 = tl.dot(v1, weight, acc1 * rescale[None, :])
    acc2 = tl.dot(v2, weight, acc2 * rescale[None, :])
    acc3 = tl.dot(v3, weight, acc3 * rescale[None, :])
    return acc0, acc1, acc2, acc3, zeros, new_largest, total


@triton.jit
def finished(acc, zeros, total, head_scale, SLICE: tl.constexpr, NVFP4: tl.constexpr):
    """Return fp32 [D/4, M]: one slice of the result; zeros for queries that have attended to no key."""
    by = tl.where(total > 0, 1.0 / total, 0.0)
    if NVFP4:
        result = acc * (by * head_scale * E2M1)[None, :]
    else:
        result = acc * (by * (CODE / LIFT / field_weight(SLICE, 4)))[None, :] + (zeros * by)[None, :]
    return result
