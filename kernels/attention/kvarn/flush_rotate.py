"""Multiplies a page's rows by a Hadamard matrix, after loading and before writing the tile; Gluon.

The result equals `rotate_reference` in `hadamard.py`, rounded to fp16 once. Rows stay in registers: nothing
goes through shared memory, and no warp waits for another.

A Hadamard matrix is a product over the bits of a channel's number, in any order. Four of the bits, including
those that a matrix operand spreads over lanes, are handled by one product with a matrix of +-1, which is
exact. Each other bit takes a butterfly, which adds and subtracts registers of one thread:

    bit    from 5 on    4, 3       2            1            0
    says   a register   the lane   a register   a register   a register's half
    in     butterfly    product    product      butterfly    product
"""

from ...triton_imports import gl, gluon, mma_v2


@gluon.constexpr_function
def rows_layout(group_size: int, dim: int, warps: int):
    """Return the layout of [G, D]: a warp holds 16 whole rows (the same rows as another warp, if there are
    more warps than rows), and a thread holds 8 of every 32 channels.
    """
    registers = [[0, 1], [0, 2], [0, 4]]
    registers += [[0, channel] for channel in _powers(32, dim)]
    registers += [[row, 0] for row in (8, *_powers(16 * warps, group_size))]
    lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    # As `_accumulator` numbers warps: the ones that have the same rows are neighbours.
    warp_bases = [[0, 0] for _ in _powers(group_size, 16 * warps)]
    warp_bases += [[row, 0] for row in _powers(16, min(group_size, 16 * warps))]
    return gl.DistributedLinearLayout(registers, lanes, warp_bases, [], [group_size, dim])


@gluon.constexpr_function
def _powers(first: int, end: int) -> list[int]:
    """Return the powers of two from `first` on, below `end`."""
    return [first << i for i in range((end // first).bit_length()) if first << i < end]


@gluon.constexpr_function
def _accumulator(group_size: int, warps: int):
    """Return the accumulator's layout for one warp per sixteen rows; further warps repeat the work."""
    by_row = min(warps, group_size // 16)
    return gl.NVMMADistributedLayout([2, 0], [by_row, warps // by_row], [16, 8])


@gluon.jit
def _signs(DTYPE: gl.constexpr, MMA: gl.constexpr):
    """Return the Hadamard matrix [16, 16] without its scale: numbers 1 and -1."""
    OPERAND: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    k = gl.arange(0, 16, gl.SliceLayout(1, OPERAND))[:, None]
    both = k & gl.arange(0, 16, gl.SliceLayout(0, OPERAND))[None, :]
    both ^= both >> 2
    both ^= both >> 1
    return (1 - 2 * (both & 1)).to(DTYPE)


@gluon.jit
def rotate_rows(x):
    """Multiply x [G, D], in the layout of `rows_layout`, by the Hadamard matrix in fp16; x in fp32 is rounded
    to fp16 first.
    """
    G: gl.constexpr = x.shape[0]
    D: gl.constexpr = x.shape[1]
    BLOCKS: gl.constexpr = D // 16
    MMA: gl.constexpr = _accumulator(G, gl.num_warps())
    if x.dtype == gl.float32:
        x = x.to(gl.float16)
    # Channels by bits 5 and up, 4 and 3, 2, 1, 0. What a thread has loaded at once is one operand: bit 1 of
    # the channel takes the place of the row's bit 3.
    parts = x.reshape([G // 16, 2, 8, D // 32, 4, 2, 2, 2]).permute((3, 1, 0, 6, 2, 5, 4, 7))
    operand = gl.convert_layout(
        parts.reshape([BLOCKS * G, 16]), gl.DotOperandLayout(0, MMA, 2), assert_trivial=True
    )
    y = mma_v2(operand, _signs(x.dtype, MMA), gl.full([BLOCKS * G, 16], 0.0, gl.float32, MMA))
    y = y.reshape([D // 32, G // 8, 2, 8 * 16]).permute((0, 2, 1, 3)).reshape([BLOCKS, G * 16])
    # A butterfly for each bit that is left, which goes from top to bottom.
    for _ in gl.static_range(BLOCKS.bit_length() - 1):
        low, high = gl.split(y.reshape([2, BLOCKS // 2, G * 16]).permute((1, 2, 0)))
        y = gl.join(low + high, low - high).permute((0, 2, 1)).reshape([BLOCKS, G * 16])
    y = (y * (1.0 / D) ** 0.5).to(gl.float16)
    return y.reshape([D // 32, 2, 2, G // 16, 8, 2, 4, 2]).permute((3, 2, 4, 0, 6, 5, 1, 7)).reshape([G, D])
