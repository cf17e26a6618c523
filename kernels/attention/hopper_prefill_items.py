"""The work items of `hopper_prefill.py`, and their order for each program.

An item is one kv head and the part of a tile that two warpgroups can handle. The computation of an item is in
`hopper_prefill.py`.
"""

from dataclasses import dataclass

from ..triton_imports import aggregate, gl, gluon, triton
from .prefill import TILE

ROWS = gl.constexpr(64)
"""Of queries, a group's heads counted, that a warpgroup takes."""


def block_of(dim: int) -> int:
    """Return the keys per block: as many as registers allow beside the sums of `dim` values."""
    return 64 if dim == 256 else 128


@dataclass(frozen=True)
class Form:
    """Compile-time parameters of the kernel.

    page       tokens in a page
    half       values, and keys of 16 bits, are fp16, else bf16
    e4m3_keys  keys are e4m3, and queries are rounded to it
    slots      of keys and of values in shared memory
    """

    heads: int
    kv_heads: int
    dim: int
    page: int
    half: bool
    window: bool
    softcap: bool
    e4m3_keys: bool = False
    slots: int = 2

    @property
    def key_dtype(self) -> gl.dtype:
        return gl.float8e4nv if self.e4m3_keys else self.dtype

    @property
    def key_width(self) -> int:
        """Return how many numbers of a key one TMA load reads: 128 bytes, or the whole of a shorter key."""
        return min(128, self.dim) if self.e4m3_keys else self.value_width

    @property
    def value_width(self) -> int:
        return 64

    @property
    def key_layout(self) -> gl.NVMMASharedLayout:
        """Return the layout of shared memory for TMA loads of keys."""
        bits = 8 if self.e4m3_keys else 16
        return gl.NVMMASharedLayout(self.key_width * bits // 8, element_bitwidth=bits, rank=2)

    @property
    def dtype(self) -> gl.dtype:
        return gl.float16 if self.half else gl.bfloat16

    @property
    def group(self) -> int:
        """A kv head's query heads, rounded up to a power of two."""
        return triton.next_power_of_2(self.heads // self.kv_heads)

    @property
    def tokens(self) -> int:
        """Return the tokens of a tile that an item covers."""
        return 2 * ROWS.value // self.group

    @property
    def parts(self) -> int:
        """Return the items of a tile and kv head."""
        return TILE // self.tokens

    @property
    def block(self) -> int:
        return block_of(self.dim)

    @property
    def box(self) -> int:
        """Return the tokens that one TMA load reads."""
        return min(self.page, self.block)


@aggregate
class Item:
    """One work item of a program.

    first_token, count       in q
    start, end               position of the first; where the context ends, 0 for padding
    request                  row of the block table
    first_block, num_blocks  of the context; none where there are no tokens
    masked_from              the first block that not every row sees whole
    """

    kv_head: gl.tensor
    first_token: gl.tensor
    count: gl.tensor
    start: gl.tensor
    end: gl.tensor
    request: gl.tensor
    first_block: gl.tensor
    num_blocks: gl.tensor
    masked_from: gl.tensor

    @gluon.constexpr_function
    def __init__(
        self, kv_head, first_token, count, start, end, request, first_block, num_blocks, masked_from
    ):
        self.kv_head = kv_head
        self.first_token = first_token
        self.count = count
        self.start = start
        self.end = end
        self.request = request
        self.first_block = first_block
        self.num_blocks = num_blocks
        self.masked_from = masked_from


@aggregate
class Items:
    """All work items, and those of this program."""

    tiles: gl.tensor
    count: gl.tensor
    window: gl.tensor

    @gluon.constexpr_function
    def __init__(self, tiles, count, window):
        self.tiles = tiles
        self.count = count
        self.window = window

    @gluon.jit
    def rounds(self):
        return (self.count + gl.num_programs(0) - 1) // gl.num_programs(0)

    @gluon.jit
    def number(self, round):
        """Items of one round go to programs in ascending order, items of the next in descending order."""
        programs = gl.num_programs(0)
        program = gl.program_id(0)
        return round * programs + gl.where(round % 2 == 0, program, programs - 1 - program)

    @gluon.jit
    def item(self, number, T: gl.constexpr):
        """Items are counted by heads of keys first, then by parts of a tile, then by tiles."""
        part = number // T.kv_heads
        tile = self.tiles + part // T.parts * 4
        offset = part % T.parts * T.tokens
        count = gl.minimum(gl.load(tile + 1) - offset, T.tokens)
        start = gl.load(tile + 2)
        end = start * 0
        if start >= 0:
            start += offset
            end = start + count
        first_block = end * 0
        masked_from = gl.minimum(start + 1, end) // T.block
        if T.window:
            first_block = gl.maximum(start - self.window + 1, 0) // T.block
            masked_from = first_block
        # Padding has a block as well, all of it hidden.
        num_blocks = gl.maximum((end + T.block - 1) // T.block - first_block, 1)
        return Item(
            number % T.kv_heads, gl.load(tile) + offset, count, start, end, gl.load(tile + 3),
            first_block, gl.where(count > 0, num_blocks, 0), masked_from,
        )  # fmt: skip
