"""INT4 experts of one decoding token in two launches, with no routing; Triton kernels and their reference.

    x            [1, K]                          bf16 or fp16
    expert       int [1, top_k]                  0 .. E-1; any other number adds nothing
    weight       [1, top_k]                      the router's, any floating type
    gate_up      int32 words and scale words     `int4.pack` of [E, 2I, K], rows of gate first
    down         int32 words and scale words     `int4.pack` of [E, N, I]
    y            [1, N]   sum_j weight[j] * down_j(silu(gate_j(x)) * up_j(x)), x's type

Groups have 128 columns or a multiple. The launches exchange the rounded activations, [top_k, I].

A program requests all its words at once and keeps them in registers; it loops only over a K of many tiles. A
warp has 16 rows and up to 8 tiles of 128 columns, 16 bytes a lane and load:

    row r, tile s:   word 4t  4t+1  4t+2  4t+3     lane (r, t): columns 4t .. 4t+3 of each slice
    mma.m16n8k16:    first operand (16 rows, a slice of 16 columns) . second (the slice, 8 columns)

The 8 columns of the second operand are the *tiles of x*, the same for every tile of words: of the product of
tile s only column s is meaningful, and is kept. The sums [16, 8] are therefore ordered by group. Scales and
zeros are applied once for 8 groups, in fp32, with S the sums of x over each group (computed as a product with
ones):

    integer zero      scale * (P + low * S)              P = sum (128 + q) x, low = -(128 + z)
    fractional zero   scale * (P - 136 * S) + low * S    low = (8 - z) * scale

Decoding a weight therefore takes 1.1 instructions (2.8 in `int4.py`), and no value changes lanes: both
operands have a slice's columns in the order of the words, which are loaded in the order that the matrix
instruction needs.

`gate_up` owns 16 rows of gate and the same of up; `down` owns 16 rows of all top_k experts, summed in the
order j = 0, 1, ...: so the same token gives the same bits. The first reads of `down` do not depend on
`gate_up`, which lets `down` begin (PDL) as soon as its own loads have been issued, and prefetches the words
of `down` into L2. The launches read 4.25 bits per weight of top_k experts.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ..device import compute_capability
from ..triton_imports import tl, triton
from .int4 import MAX_GROUP, reference_weight

ROWS = 16
"""Of a weight in a program, the M of a matrix instruction."""
MOST_STEPS = 8
"""Tiles of words whose sums lie side by side, the N of a matrix instruction."""
MOST_TAKEN = 16
"""Experts of the token: `down` has a warp for each."""


@dataclass(frozen=True)
class Tuning:
    """gate_up_splits, down_splits: warps that share K; prefetch: `gate_up` prefetches the words of `down`."""

    gate_up_splits: int
    down_splits: int
    prefetch: bool


TUNING = Tuning(gate_up_splits=2, down_splits=1, prefetch=True)
"""What is served. `tests/bench/kernels/experts_one_token.py` times it beside others."""


@dataclass(frozen=True)
class Int4Operand:
    """A packed weight [E, n, k], made by `int4.pack`."""

    words: Tensor
    scale_words: Tensor
    n: int
    k: int
    group_size: int
    fractional: bool


def serves(gate_up: Int4Operand, down: Int4Operand) -> bool:
    """Say whether the kernels of this file support the given weights of experts."""
    return (
        all(operand.group_size % MAX_GROUP == 0 for operand in (gate_up, down))
        and gate_up.fractional == down.fractional
        and gate_up.n == 2 * down.k
    )


def experts_reference(
    x: Tensor, expert: Tensor, weight: Tensor, gate_up: Int4Operand, down: Int4Operand
) -> Tensor:
    """Return y [1, N], computed in fp64, activations too, one expert at a time."""
    y = torch.zeros(1, down.n, dtype=torch.float64, device=x.device)
    for index, share in zip(expert[0].tolist(), weight[0].double(), strict=True):
        if 0 <= index < len(gate_up.words):
            gate, up = (x.double() @ _dequantized(gate_up, index, x.dtype).t()).chunk(2, dim=1)
            y += share * ((functional.silu(gate) * up) @ _dequantized(down, index, x.dtype).t())
    return y


def _dequantized(operand: Int4Operand, index: int, dtype: torch.dtype) -> Tensor:
    expert = slice(index, index + 1)
    rest = operand.n, operand.group_size, operand.fractional, dtype
    weight = reference_weight(operand.words[expert], operand.scale_words[expert], *rest, rounded=False)
    return weight[0, :, : operand.k].double()


@triton.constexpr_function
def codes_asm(half):
    """Return PTX that turns two words of a row into eight registers, one a slice, each with two numbers 128 +
    q.
    """
    code = "0x64006400" if half else "0x43004300"
    lines = [".reg .b32 t;"]
    for j in range(8):
        source = f"${8 + j // 4}"
        if j % 4:
            lines.append(f"shr.u32 t, {source}, {4 * (j % 4)};")
            source = "t"
        lines.append(f"lop3.b32 ${j}, {source}, 0x000F000F, {code}, 0xEA;")
    return "{\n" + "\n".join(lines) + "\n}"


@triton.constexpr_function
def codes_types(half):
    return (tl.float16 if half else tl.bfloat16,) * 8


@triton.jit
def codes_of(words, WARPS: tl.constexpr, HALF: tl.constexpr, ASM: tl.constexpr):
    """Turn a word tile [8, WARPS, 2, 16] into first operands [WARPS, 16, 128], 128 + q (fp16: 1024 + q)."""
    if ASM:
        asm: tl.constexpr = codes_asm(HALF)
        types: tl.constexpr = codes_types(HALF)
        part = tl.inline_asm_elementwise(
            asm, "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r", (words,), dtype=types, is_pure=True, pack=2
        )
        even = tl.join(tl.join(part[0], part[4]), tl.join(part[2], part[6]))
        odd = tl.join(tl.join(part[1], part[5]), tl.join(part[3], part[7]))
        codes = tl.join(even, odd)  # row % 8, warp, row / 8, column, j / 4, j / 2 % 2, j % 2
        codes = tl.permute(tl.reshape(codes, [8, WARPS, 2, 16, 8]), [1, 2, 0, 4, 3])
    else:
        word = tl.reshape(words, [8, WARPS, 2, 8, 2, 1, 1])  # row % 8, warp, row / 8, column / 2, j / 4
        shift = tl.arange(0, 2)[:, None] * 16 + tl.arange(0, 4)[None, :] * 4
        codes = (word >> tl.reshape(shift, [1, 1, 1, 1, 1, 2, 4])) & 0xF  # ..., column % 2, j % 4
        codes = tl.permute(codes, [1, 2, 0, 4, 6, 3, 5]).to(tl.float32) + (1024.0 if HALF else 128.0)
    return tl.reshape(codes, [WARPS, 16, 128])


@triton.jit
def zeros_of(words, ASM: tl.constexpr):
    """Return zeros that the compiler does not know to be equal. If it knew, it would unpack a single word,
    without the word beside it."""
    if ASM:
        return tl.inline_asm_elementwise(
            "mov.b32 $0, 0;", "=r,r", (words,), dtype=tl.int32, is_pure=True, pack=1
        )
    return words * 0


@triton.jit
def load_words(at, tile, k_tiles, STEPS: tl.constexpr, EVEN: tl.constexpr):
    """Load the words of STEPS tiles from `tile` on, each [8, WARPS, 2, 16]; zeros beyond the last tile."""
    words = ()
    for step in tl.static_range(STEPS):
        if EVEN:
            tile_words = tl.load(at + step * 1024, eviction_policy="evict_first")
        else:
            inside = tile + step < k_tiles
            tile_words = tl.load(at + step * 1024, mask=inside, other=0, eviction_policy="evict_first")
        words = words + (tile_words,)  # type: ignore[assignment] # noqa: RUF005
    return words


@triton.jit
def scaled_sums(
    words, scale_words, x, WARPS: tl.constexpr, STEPS: tl.constexpr,
    FRACTIONAL: tl.constexpr, HALF: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Multiply words by the tiles x [WARPS, 128, 8]; return the products by group, [WARPS, 16, 8].

    scale_words: element [t, r, warp, h, u] is of tile 2t + u and row 8h + r, as a warp holds its products
    """
    DTYPE: tl.constexpr = tl.float16 if HALF else tl.bfloat16
    if not ASM:
        x = x.to(tl.float32)
    group = tl.arange(0, 8)[None, None, :]
    sums = tl.zeros([WARPS, 16, 8], tl.float32)
    for step in tl.static_range(STEPS):
        product = tl.dot(codes_of(words[step], WARPS, HALF, ASM), x)
        sums = tl.where(group == step, product, sums)
    # Codes of zero are all 128 (fp16: 1024); a matrix of ones would want x in other registers.
    x_sums = tl.dot(codes_of(zeros_of(words[0], ASM), WARPS, HALF, ASM), x)
    x_sums *= 1 / 1024 if HALF else 1 / 128
    scale_words = tl.reshape(tl.permute(scale_words, [2, 3, 1, 0, 4]), [WARPS, 16, 8])
    scale = (scale_words >> 16).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
    low = scale_words.to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
    if FRACTIONAL:
        return scale * (sums - (1032.0 if HALF else 136.0) * x_sums) + low * x_sums
    return scale * (sums + low * x_sums)


@triton.constexpr_function
def prefetch_asm():
    return (
        "{ .reg .pred p; .reg .b32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0; setp.ne.and.u32 p, $2, 0, p; "
        "@p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }"
    )


@triton.jit
def prefetch_share(of, bytes_each, index, SHARES: tl.constexpr):
    """Let thread 0 prefetch one of SHARES parts of `bytes_each` bytes at `of` into L2."""
    share = tl.cdiv(bytes_each, SHARES * 128) * 128
    begin = index * share
    count = tl.maximum(tl.minimum(share, bytes_each - begin), 0) & -16
    address = of.to(tl.int64) + begin
    asm: tl.constexpr = prefetch_asm()
    tl.inline_asm_elementwise(asm, "=r,l,r", [address, count], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def word_rows(first, last):
    """Return the rows of a program's words, [8, 1, 2, 1]; rows beyond `last` repeat it and are not stored."""
    inner = tl.arange(0, 2)[None, None, :, None] * 8 + tl.arange(0, 8)[:, None, None, None]
    return tl.minimum(first + inner, last)


@triton.jit
def scale_rows(first, last):
    """Return the rows of a program's scale words, [1, 8, 1, 2, 1]."""
    inner = tl.arange(0, 2)[None, None, None, :, None] * 8 + tl.arange(0, 8)[None, :, None, None, None]
    return tl.minimum(first + inner, last)


@triton.jit
def scale_tiles():
    """Return the tiles of scale words, [4, 1, 1, 1, 2]."""
    return tl.arange(0, 4)[:, None, None, None, None] * 2 + tl.arange(0, 2)[None, None, None, None, :]


@triton.jit
def add_pairs(gate, up, more_gate, more_up):
    return gate + more_gate, up + more_up


class GateUpForm(NamedTuple):
    """Compile-time parameters of `gate_up_kernel`.

    splits: warps that share K
    steps:  tiles of a warp in a round
    even: whether K is a whole number of rounds
    """

    programs: int
    splits: int
    steps: int
    rounds: int
    even: bool
    fractional: bool
    half: bool
    prefetch: bool
    asm: bool
    pdl: bool


@triton.jit(do_not_specialize_on_alignment=["expert"])
def gate_up_kernel(
    x, words, scale_words, expert, activation, next_words, next_scales, E, inner, K, rows, k_tiles,
    next_word_bytes, next_scale_bytes, FORM: tl.constexpr,
):  # fmt: skip
    """Compute 16 activations of an expert; a warp has gate or up, and part of K; grid (FORM.programs, top_k).

    inner: I
    rows:  2 * I padded to whole tiles; next_*: the weights of `down`, and an expert's bytes there
    """
    WARPS: tl.constexpr = 2 * FORM.splits
    ROUNDS: tl.constexpr = FORM.rounds
    warp = tl.arange(0, WARPS)
    first = tl.program_id(0) * 16
    row = warp[None, :, None, None] // FORM.splits * inner + word_rows(first, inner - 1)
    split = warp[None, :, None, None] % FORM.splits * FORM.steps
    word = (row // 64 * k_tiles * 64 + row % 64) * 16 + tl.arange(0, 16)[None, None, None, :] + split * 1024
    scale_row = warp[None, None, :, None, None] // FORM.splits * inner + scale_rows(first, inner - 1)
    scale_tile = warp[None, None, :, None, None] % FORM.splits * FORM.steps + scale_tiles()
    scale_word = scale_tile * rows + scale_row
    group = tl.arange(0, 8)[None, None, :]
    at = (warp[:, None, None] % FORM.splits * FORM.steps + group) * 128 + tl.arange(0, 128)[None, :, None]

    if FORM.pdl:
        tl.extra.cuda.gdc_wait()
    index = tl.load(expert + tl.program_id(1)).to(tl.int64)
    index = tl.where((index >= 0) & (index < E), index, 0)
    words_at = words + index * rows * k_tiles * 16 + word
    scales_at = scale_words + index * rows * k_tiles + scale_word
    total = tl.zeros([WARPS, 16, 8], tl.float32)
    for turn in tl.static_range(ROUNDS):
        start = turn * FORM.splits * FORM.steps
        of_turn = load_words(words_at + start * 1024, split + start, k_tiles, FORM.steps, FORM.even)
        inside = (scale_tiles() < FORM.steps) & (scale_tile + start < k_tiles)
        scale = tl.load(scales_at + start * rows, mask=inside, other=0)
        if FORM.pdl and turn == 0:
            tl.extra.cuda.gdc_launch_dependents()
        if FORM.prefetch and turn == 0:
            part = tl.program_id(0)
            words_of_next = next_words + index * (next_word_bytes // 4)
            prefetch_share(words_of_next, next_word_bytes, part, FORM.programs)
            scales_of_next = next_scales + index * (next_scale_bytes // 4)
            prefetch_share(scales_of_next, next_scale_bytes, part, FORM.programs)
        x_at = at + start * 128
        x_tiles = tl.load(x + x_at, mask=(group < FORM.steps) & (x_at < K), other=0.0)
        total += scaled_sums(of_turn, scale, x_tiles, WARPS, FORM.steps, FORM.fractional, FORM.half, FORM.asm)
    of_warp = tl.sum(total, axis=2)
    is_gate = (warp < FORM.splits)[:, None]
    halves = tl.where(is_gate, of_warp, 0.0), tl.where(is_gate, 0.0, of_warp)
    gate, up = tl.reduce(halves, 0, add_pairs)
    number = gate / (1.0 + tl.exp(-gate)) * up
    to = first + tl.arange(0, 16)
    activation += tl.program_id(1) * inner
    tl.store(activation + to, number.to(activation.dtype.element_ty), mask=to < inner)


class DownForm(NamedTuple):
    """Compile-time parameters of `down_kernel`; taken: experts of the token; padded: to a power of two."""

    taken: int
    padded: int
    splits: int
    steps: int
    rounds: int
    even: bool
    fractional: bool
    half: bool
    asm: bool
    pdl: bool


@triton.jit(do_not_specialize_on_alignment=["expert", "weight"])
def down_kernel(
    activation, words, scale_words, expert, weight, y, E, N, K, rows, k_tiles, FORM: tl.constexpr,
):  # fmt: skip
    """Compute 16 numbers of y; a warp has one of FORM.padded experts and a part of K; grid (row tiles).

    Before the kernel waits for `gate_up` it reads weights, experts and the experts' shares, which existed
    before `gate_up` let it begin.
    """
    WARPS: tl.constexpr = FORM.padded * FORM.splits
    ROUNDS: tl.constexpr = FORM.rounds
    warp = tl.arange(0, WARPS)
    first = tl.program_id(0) * 16
    taken = warp // FORM.splits
    index = tl.load(expert + taken, mask=taken < FORM.taken, other=-1).to(tl.int64)
    share = tl.load(weight + taken, mask=taken < FORM.taken, other=0.0).to(tl.float32)
    valid = (index >= 0) & (index < E)
    index = tl.where(valid, index, 0)

    row = word_rows(first, N - 1)
    split = warp[None, :, None, None] % FORM.splits * FORM.steps
    word = (row // 64 * k_tiles * 64 + row % 64) * 16 + tl.arange(0, 16)[None, None, None, :] + split * 1024
    words_at = words + index[None, :, None, None] * rows * k_tiles * 16 + word
    scale_tile = warp[None, None, :, None, None] % FORM.splits * FORM.steps + scale_tiles()
    scales_at = scale_words + index[None, None, :, None, None] * rows * k_tiles
    scales_at += scale_tile * rows + scale_rows(first, N - 1)
    group = tl.arange(0, 8)[None, None, :]
    at = (warp[:, None, None] % FORM.splits * FORM.steps + group) * 128 + tl.arange(0, 128)[None, :, None]

    total = tl.zeros([WARPS, 16, 8], tl.float32)
    for turn in tl.static_range(ROUNDS):
        start = turn * FORM.splits * FORM.steps
        of_turn = load_words(words_at + start * 1024, split + start, k_tiles, FORM.steps, FORM.even)
        inside = (scale_tiles() < FORM.steps) & (scale_tile + start < k_tiles)
        scale = tl.load(scales_at + start * rows, mask=inside, other=0)
        if FORM.pdl and turn == 0:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        x_at = at + start * 128
        inside = (group < FORM.steps) & (x_at < K) & (taken[:, None, None] < FORM.taken)
        x_tiles = tl.load(activation + taken[:, None, None] * K + x_at, mask=inside, other=0.0)
        total += scaled_sums(of_turn, scale, x_tiles, WARPS, FORM.steps, FORM.fractional, FORM.half, FORM.asm)
    of_warp = tl.where(valid[:, None], tl.sum(total, axis=2) * share[:, None], 0.0)
    to = first + tl.arange(0, 16)
    tl.store(y + to, tl.sum(of_warp, axis=0).to(y.dtype.element_ty), mask=to < N)


def steps_and_rounds(k_tiles: int, splits: int) -> tuple[int, int]:
    """Return the number of a warp's tiles in a round, and the number of rounds, so that as little work as
    possible is wasted.
    """
    rounds = triton.cdiv(k_tiles, splits * MOST_STEPS)
    return triton.cdiv(k_tiles, splits * rounds), rounds


def experts(
    x: Tensor,
    expert: Tensor,
    weight: Tensor,
    gate_up: Int4Operand,
    down: Int4Operand,
    tuning: Tuning = TUNING,
    out: Tensor | None = None,
) -> Tensor:
    """Return y [1, N], `out` if it is given; the file's docstring describes the tensors."""
    if len(x) != 1 or expert.shape[1] > MOST_TAKEN or not serves(gate_up, down):
        raise ValueError(f"{len(x)} tokens of {expert.shape[1]} experts, or weights that do not fit together")
    x, expert, weight = x.contiguous(), expert.contiguous(), weight.contiguous()
    activation = launch_gate_up(x, expert, gate_up, down, tuning)
    return launch_down(activation, expert, weight, down, tuning, out)


def launch_gate_up(
    x: Tensor, expert: Tensor, gate_up: Int4Operand, down: Int4Operand, tuning: Tuning
) -> Tensor:
    """Return activations [top_k, I], and have `down` prefetched into L2."""
    taken, programs = expert.shape[1], triton.cdiv(down.k, ROWS)
    activation = torch.empty((taken, down.k), dtype=x.dtype, device=x.device)
    pdl = compute_capability(x.device) >= (9, 0)
    splits, k_tiles = tuning.gate_up_splits, gate_up.words.shape[2]
    steps, rounds = steps_and_rounds(k_tiles, splits)
    form = GateUpForm(
        programs=programs,
        splits=splits,
        steps=steps,
        rounds=rounds,
        even=splits * steps * rounds == k_tiles,
        fractional=gate_up.fractional,
        half=x.dtype == torch.float16,
        prefetch=tuning.prefetch and pdl,
        asm=x.device.type == "cuda",
        pdl=pdl,
    )
    gate_up_kernel[(programs, taken)](
        x, gate_up.words, gate_up.scale_words, expert, activation, down.words, down.scale_words,
        len(gate_up.words), down.k, gate_up.k, gate_up.scale_words.shape[2], k_tiles,
        down.words.stride(0) * 4, down.scale_words.stride(0) * 4, form,
        num_warps=2 * splits, num_stages=1, launch_pdl=pdl,
    )  # fmt: skip
    return activation


def launch_down(
    activation: Tensor,
    expert: Tensor,
    weight: Tensor,
    down: Int4Operand,
    tuning: Tuning,
    out: Tensor | None = None,
) -> Tensor:
    """Return y [1, N], from activations [top_k, I]. Experts and weight must be older than the last launch."""
    taken = expert.shape[1]
    y = torch.empty((1, down.n), dtype=activation.dtype, device=activation.device) if out is None else out
    pdl = compute_capability(activation.device) >= (9, 0)
    padded, k_tiles = triton.next_power_of_2(taken), down.words.shape[2]
    splits = tuning.down_splits * max(1, 8 // padded)
    steps, rounds = steps_and_rounds(k_tiles, splits)
    form = DownForm(
        taken=taken,
        padded=padded,
        splits=splits,
        steps=steps,
        rounds=rounds,
        even=splits * steps * rounds == k_tiles,
        fractional=down.fractional,
        half=activation.dtype == torch.float16,
        asm=activation.device.type == "cuda",
        pdl=pdl,
    )
    down_kernel[(triton.cdiv(down.n, ROWS),)](
        activation, down.words, down.scale_words, expert, weight, y,
        len(down.words), down.n, down.k, down.scale_words.shape[2], k_tiles, form,
        num_warps=padded * splits, num_stages=1, launch_pdl=pdl,
    )  # fmt: skip
    return y
