"""Reads words of four-bit codes from the ring: shared by the decoders of all formats of four bits.

A tile of 64 rows and 64 columns is 2 KB, 512 words; a lane's four words lie side by side:

    word index   w . r . t . v . u         v: columns + 8    u: rows + 8
    bits         2   3   2   1   1

The meaning of the codes in a word is left to the decoders.
"""

from ..triton_imports import gl, gluon, reinterpret
from .ptx import load_shared_v4

WORD_ROWS = 8
PLAIN_5D = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [4, 3, 2, 1, 0]))


@gluon.constexpr_function
def words_register_layout(rows: int):
    """Return the layout of a tile's words, [row / 16, r, t, v, u], over all warps: each thread has the four
    words of its lane.
    """
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 0, 0, 1], [0, 0, 0, 1, 0]],
        lane_bases=[[0, 0, 1, 0, 0], [0, 0, 2, 0, 0], [0, 1, 0, 0, 0], [0, 2, 0, 0, 0], [0, 4, 0, 0, 0]],
        warp_bases=[[1, 0, 0, 0, 0], [2, 0, 0, 0, 0], [4, 0, 0, 0, 0]][: 2 if rows == 64 else 3],
        block_bases=[],
        shape=[rows // 16, 8, 4, 2, 2],
    )


@gluon.jit
def words_offset(warp, r, quad, t):
    """Return where, in bytes from the start of a stage, a lane's words of the first tile lie."""
    return (warp // 4) * (t.K_TILES * 2048) + ((warp % 4) * 32 + r * 4 + quad) * 16


@gluon.jit
def read_words(slot, lane, TILE: gl.constexpr, t, smem):
    """Read a lane's four words of one tile of 64 columns, [row / 16, r, t, v, u]."""
    a, b, c, d = load_shared_v4(lane + slot * smem.WORD_BYTES, smem.WORDS + TILE * 2048)
    return gl.join(gl.join(a, c), gl.join(b, d))


@gluon.jit
def load_words(words_smem, TILE: gl.constexpr, t):
    """Load the words of one tile of a stage; with BN=128, stages have one tile."""
    spread: gl.constexpr = words_register_layout(t.BN)
    tiles: gl.constexpr = [words_smem.shape[0] * words_smem.shape[1] // (t.BN // 8), t.BN // 16, 8, 4, 2, 2]
    return reinterpret(words_smem, gl.int32, tiles, PLAIN_5D).index(TILE).load(spread)
