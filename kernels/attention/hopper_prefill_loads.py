"""TMA loads of `hopper_prefill.py`: the producer warp, and the rings of keys and values that it fills.

Pages are scattered over memory, so a block of keys takes one load for each page it touches and for each group
of columns that fits in one load. The consumers' computation is in `hopper_prefill.py`.
"""

from ..triton_imports import aggregate, gl, gluon, mbarrier, tma_load


@aggregate
class Ring:
    """The ring's slots for keys and for values, [slots, block, D]; the same memory as boxes that TMA fills;
    mbarriers that count the bytes in each slot, and mbarriers that count the warpgroups that no longer need a
    slot.
    """

    keys: gl.shared_memory_descriptor
    values: gl.shared_memory_descriptor
    key_boxes: gl.shared_memory_descriptor
    value_boxes: gl.shared_memory_descriptor
    keys_full: gl.shared_memory_descriptor
    keys_empty: gl.shared_memory_descriptor
    values_full: gl.shared_memory_descriptor
    values_empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(
        self, keys, values, key_boxes, value_boxes, keys_full, keys_empty, values_full, values_empty
    ):
        self.keys = keys
        self.values = values
        self.key_boxes = key_boxes
        self.value_boxes = value_boxes
        self.keys_full = keys_full
        self.keys_empty = keys_empty
        self.values_full = values_full
        self.values_empty = values_empty


@gluon.jit
def slot_of(turn, T: gl.constexpr):
    """Return the slot in a ring of block number `turn`."""
    return turn & 1 if T.slots == 2 else turn % T.slots


@gluon.jit
def phase_of(turn, T: gl.constexpr):
    """Of the slot's mbarriers."""
    return (turn >> 1 if T.slots == 2 else turn // T.slots) & 1


@gluon.jit
def load_block(
    desc, boxes, full, turn, block, table, item, WIDTH: gl.constexpr, T: gl.constexpr
):  # fmt: skip
    """Start loading block number `block` of an item's keys or values into the slot of `turn`."""
    slot = slot_of(turn, T)
    bar = full.index(slot)
    mbarrier.expect(bar, T.block * T.dim * (desc.dtype.primitive_bitwidth // 8))
    for part in gl.static_range(T.block // T.box):
        token = (item.first_block + block) * T.block + part * T.box
        # Behind the end of the context the last page again: those rows are hidden.
        page = gl.load(table + gl.maximum(gl.minimum(token, item.end - 1), 0) // T.page)
        row = (page * T.kv_heads + item.kv_head) * T.page + token % T.page
        for column in gl.static_range(T.dim // WIDTH):
            box = (slot * (T.dim // WIDTH) + column) * (T.block // T.box) + part
            tma_load(desc, [row, column * WIDTH], bar, boxes.index(box))


@gluon.jit
def producer_partition(
    key_desc, value_desc, ring, key_table, block_table, key_table_stride, table_stride, items,
    T: gl.constexpr,
):  # fmt: skip
    """Run the one warp that issues the TMA loads; keys go a block ahead of values."""
    turns = items.count * 0
    for round in range(0, items.rounds()):
        number = items.number(round)
        if number < items.count:
            item = items.item(number, T)
            key_pages = key_table + item.request.to(gl.int64) * key_table_stride
            value_pages = block_table + item.request.to(gl.int64) * table_stride
            for block in range(0, item.num_blocks + 1):
                turn = turns + block
                if block < item.num_blocks:
                    mbarrier.wait(ring.keys_empty.index(slot_of(turn, T)), phase_of(turn, T) ^ 1)
                    load_block(
                        key_desc, ring.key_boxes, ring.keys_full, turn, block, key_pages, item,
                        T.key_width, T,
                    )  # fmt: skip
                if block > 0:
                    before = turn - 1
                    mbarrier.wait(ring.values_empty.index(slot_of(before, T)), phase_of(before, T) ^ 1)
                    load_block(
                        value_desc, ring.value_boxes, ring.values_full, before, block - 1, value_pages, item,
                        T.value_width, T,
                    )  # fmt: skip
            turns += item.num_blocks
