"""The PTX that turns a word into two vectors of IQ2_XXS weights: two look-ups, then the signs.

The codebook lies at the start of shared memory, at `global_smem` (a test checks that). An entry takes 128
bytes: eight copies of its eight 16-bit numbers. Lane i reads copy i % 8, so the eight lanes that a 16-byte
load serves at once never conflict in a bank. One LOP3 makes an address from the index, where it stands in the
word, and the offset of the lane's copy. The file holds plain text for the decoder of wgmma's operand and for
the product of one row; `packing.py` describes the bits.
"""

from ..triton_imports import gl, gluon
from .packing import INDEX_SHIFT, SIGN_BITS

ENTRIES, COPIES = 256, 8
TABLE_BYTES = ENTRIES * COPIES * 16
INDEX_MASK = 0xFF << INDEX_SHIFT
DECLARATIONS = ".reg .b32 a, s, base;", "mov.u32 base, global_smem;"


@gluon.constexpr_function
def load_lines(outs, word, below, copy, offset):
    """Return the numbers of one vector, without signs: `outs` are four registers, or two at `offset` bytes.

    below: 1 for the vector of row r + 8, else 0;  copy: 16 times the lane's copy
    """
    index = "a" if below else word
    lines = [f"shr.u32 a, {word}, 16;"] if below else []
    lines += [f"lop3.b32 a, {index}, {INDEX_MASK}, {copy}, 0xEA;", "add.u32 a, a, base;"]
    return [*lines, f"ld.shared.v{len(outs)}.b32 {{{','.join(outs)}}}, [a+{offset}];"]


@gluon.constexpr_function
def sign_lines(out, word, below, pair):
    """Apply the signs of a pair of weights to the pair; the register s is overwritten."""
    shift = 15 - SIGN_BITS[4 * below + pair]
    lines = [f"shl.b32 s, {word}, {shift};"] if shift else []
    return [*lines, f"lop3.b32 {out}, {'s' if shift else word}, 0x80008000, {out}, 0x6A;"]


@gluon.jit
def fill_table(table, codebook, ROWS: gl.constexpr, WARPS: gl.constexpr):
    """Copy the codebook [256, 8], 16-bit numbers seen as int32 [256, 4], eight times to shared memory.

    table: int32 [256 / ROWS or more, ROWS, 32] at its start
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [WARPS, 1], [1, 0])
    entry = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    word = gl.arange(0, 32, gl.SliceLayout(0, layout))
    for block in gl.static_range(256 // ROWS):
        first = codebook + block * ROWS * 4
        table.index(block).store(gl.load(first + entry[:, None] * 4 + word[None, :] % 4))
