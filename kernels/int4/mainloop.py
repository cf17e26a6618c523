"""The products of a CTA's part of a tile in `stream_k.py`: words unpacked, multiplied, summed up in fp32.

What one warpgroup starts waits in the matrix unit's queue, which takes two or three products of 16 columns;
at the next it stands still until there is room. So what is unpacked behind all products of a chunk is hidden
by the last of them only:

    chunked_mainloop   unpack 64 or 128 columns, then start their products: up to 64 rows of x, where bytes from HBM
                are what takes long, or where the scale multiplies the sums
    sliced_mainloop   unpack 16 columns, start their product, unpack the next 16: more rows. Their words are read
                while products of the stage before are in the queue

Both wait for a stage of the ring with all lanes and free it once per warp (`ptx.py`), and return the
sums, the slot behind their last stage and its phase. Not for `invariant.py`, which has its own loop.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from .ptx import load_shared_asm, load_shared_pair_asm, load_shared_v4_asm, mbarrier_arrive, mbarrier_wait
from .unpack import scale_from_word, wgmma_operand, zero_and_scale


@gluon.constexpr_function
def lane_layout(warps):
    """[row / 16, r, t]: one element a thread."""
    return gl.DistributedLinearLayout(
        reg_bases=[],
        lane_bases=[[0, 0, 1], [0, 0, 2], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        warp_bases=[[1, 0, 0], [2, 0, 0], [4, 0, 0]][: 2 if warps == 4 else 3],
        block_bases=[],
        shape=[warps, 8, 4],
    )


@gluon.jit
def lane_offsets(BN: gl.constexpr, K_TILES: gl.constexpr):
    """In a stage, the bytes at which a lane's words of a tile and the zeros and scales of its rows lie."""
    spread: gl.constexpr = lane_layout(BN // 16)
    of_warp: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, spread))
    of_r: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, spread))
    of_t: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, spread))
    warp = gl.expand_dims(gl.expand_dims(gl.arange(0, BN // 16, of_warp), 1), 2)
    r = gl.expand_dims(gl.expand_dims(gl.arange(0, 8, of_r), 0), 2)
    t = gl.expand_dims(gl.expand_dims(gl.arange(0, 4, of_t), 0), 1)
    lane = (warp // 4) * (K_TILES * 2048) + ((warp % 4) * 32 + r * 4 + t) * 16
    row = (warp * 16 + r) * 4 + t * 0
    return lane, row


@gluon.jit
def read_words(stage, lane, OFFSET: gl.constexpr):
    """A lane's four words of one tile of 64 columns, [row / 16, r, t, v, u]."""
    a, b, c, d = gl.inline_asm_elementwise(
        load_shared_v4_asm(OFFSET), "=r,=r,=r,=r,r", [lane + stage],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=False, pack=1,
    )  # fmt: skip
    return gl.join(gl.join(a, c), gl.join(b, d))


@gluon.jit
def read_scales(
    stage, row, OFFSET: gl.constexpr, STEP: gl.constexpr, GROUP: gl.constexpr, FRACTIONAL: gl.constexpr,
    HALF: gl.constexpr, SCALE_WEIGHTS: gl.constexpr,
):  # fmt: skip
    """For each group of a tile the zeros and scales of the lane's rows r and r + 8."""
    scales = ()
    for group in gl.static_range(64 // GROUP if GROUP < 64 else 1):
        a, b = gl.inline_asm_elementwise(
            load_shared_pair_asm(OFFSET + group * STEP, 32), "=r,=r,r", [row + stage],
            dtype=(gl.int32, gl.int32), is_pure=False, pack=1,
        )  # fmt: skip
        a1, a2 = zero_and_scale(a, FRACTIONAL, HALF, SCALE_WEIGHTS)
        b1, b2 = zero_and_scale(b, FRACTIONAL, HALF, SCALE_WEIGHTS)
        first = gl.join(gl.join(a1, a1), gl.join(b1, b1))
        second = gl.join(gl.join(a2, a2), gl.join(b2, b2))
        scales = scales + (first, second)  # type: ignore[assignment]  # noqa: RUF005
    return scales


@gluon.jit
def read_accumulator_scales(slot, CHUNK: gl.constexpr, SCALES: gl.constexpr, BN: gl.constexpr, SCALE_BYTES: gl.constexpr,
    MMA: gl.constexpr,
):  # fmt: skip
    """The scales of chunk `CHUNK`, a group of 128 columns, as they multiply its sums: [BN, 1]."""
    row = gl.arange(0, BN, gl.SliceLayout(1, MMA))
    scale_words = gl.inline_asm_elementwise(
        load_shared_asm(SCALES + CHUNK * BN * 4), "=r,r", [slot * SCALE_BYTES + row * 4],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    return gl.expand_dims(scale_from_word(scale_words), 1)


@gluon.jit
def read_operand(
    slot, lane, row, CHUNK: gl.constexpr, BN: gl.constexpr, SLICES: gl.constexpr, K_TILES: gl.constexpr,
    GROUP: gl.constexpr, FRACTIONAL: gl.constexpr, HALF: gl.constexpr, SCALE_WEIGHTS: gl.constexpr,
    MMA: gl.constexpr, WORDS: gl.constexpr, SCALES: gl.constexpr, SCALE_BYTES: gl.constexpr,
):  # fmt: skip
    """Chunk `CHUNK` of a stage, `SLICES` slices of 16 columns, as wgmma's operand [BN, 16 * SLICES].

    Beside it the scales of its sums, where these are to be multiplied by them.
    """
    tile: gl.constexpr = CHUNK * SLICES // 4
    step: gl.constexpr = BN * 4
    words_at = slot * (BN * K_TILES * 32)
    scales_at = slot * SCALE_BYTES
    words = read_words(words_at, lane, WORDS + tile * 2048)
    scales = read_scales(
        scales_at, row, SCALES + tile * 64 // GROUP * step, step, GROUP, FRACTIONAL, HALF, SCALE_WEIGHTS
    )
    more_words = words
    more_scales = scales
    if SLICES == 8:
        more_words = read_words(words_at, lane, WORDS + (tile + 1) * 2048)
        if GROUP < 128:
            more_scales = read_scales(
                scales_at,
                row,
                SCALES + (tile + 1) * 64 // GROUP * step,
                step,
                GROUP,
                FRACTIONAL,
                HALF,
                SCALE_WEIGHTS,
            )
    operand = wgmma_operand(
        words, scales, more_words, more_scales, CHUNK, BN, SLICES, GROUP, FRACTIONAL, HALF, SCALE_WEIGHTS, MMA
    )
    if SCALE_WEIGHTS:
        return operand, 1.0
    else:
        return operand, read_accumulator_scales(slot, CHUNK, SCALES, BN, SCALE_BYTES, MMA)


@gluon.jit
def chunked_mainloop(
    x_ring, slot, phase, piece, piece_end, lane, row,
    BN: gl.constexpr, BM: gl.constexpr, GROUP: gl.constexpr, FRACTIONAL: gl.constexpr, HALF: gl.constexpr,
    STAGES: gl.constexpr, K_TILES: gl.constexpr, SLICES: gl.constexpr, UNIT: gl.constexpr, WORDS: gl.constexpr,
    SCALES: gl.constexpr, SCALE_BYTES: gl.constexpr, FULL: gl.constexpr, EMPTY: gl.constexpr,
    SCALE_WEIGHTS: gl.constexpr, MMA: gl.constexpr,
):  # fmt: skip
    """The products of stages `piece` to `piece_end`, a multiple of `UNIT`.

    A turn of the loop takes an even number of chunks, so that the operand in flight and the one being made
    keep registers of their own; unpacking one chunk runs beside the product of the one before it.
    """
    chunks: gl.constexpr = K_TILES * 4 // SLICES
    accumulator = gl.zeros([BN, BM], gl.float32, MMA)
    mbarrier_wait(FULL + slot * 8, phase)
    weight, scale = read_operand(
        slot,
        lane,
        row,
        0,
        BN,
        SLICES,
        K_TILES,
        GROUP,
        FRACTIONAL,
        HALF,
        SCALE_WEIGHTS,
        MMA,
        WORDS,
        SCALES,
        SCALE_BYTES,
    )
    before = weight
    for turn in range(piece, piece_end, UNIT):
        for i in gl.static_range(UNIT):
            stage = turn + i
            wraps = slot + 1 >= STAGES
            following = gl.where(wraps, slot + 1 - STAGES, slot + 1)
            for chunk in gl.static_range(chunks):
                x_chunk = x_ring.index(slot).slice(chunk * 16 * SLICES, 16 * SLICES, dim=1).permute((1, 0))
                products = warpgroup_mma(weight, x_chunk, accumulator, use_acc=SCALE_WEIGHTS, is_async=True)
                scale_before = scale
                if SCALE_WEIGHTS:
                    # At most this product is in flight: the one before it is done.
                    accumulator, before = warpgroup_mma_wait(1, deps=[products, before])
                before = weight
                if chunk == 0:
                    previous = gl.where(slot - 1 < 0, slot - 1 + STAGES, slot - 1)
                    mbarrier_arrive(EMPTY + previous * 8, stage > piece)
                if chunk + 1 < chunks:
                    weight, scale = read_operand(
                        slot, lane, row, chunk + 1, BN, SLICES, K_TILES, GROUP, FRACTIONAL, HALF, SCALE_WEIGHTS, MMA,
                        WORDS, SCALES, SCALE_BYTES,
                    )  # fmt: skip
                else:
                    # Behind the last stage of a piece this unpacks what is not used.
                    phase = gl.where(wraps, phase ^ 1, phase)
                    if stage + 1 < piece_end:
                        mbarrier_wait(FULL + following * 8, phase)
                    weight, scale = read_operand(
                        following, lane, row, 0, BN, SLICES, K_TILES, GROUP, FRACTIONAL, HALF, SCALE_WEIGHTS, MMA,
                        WORDS, SCALES, SCALE_BYTES,
                    )  # fmt: skip
                if not SCALE_WEIGHTS:
                    products, before = warpgroup_mma_wait(0, deps=[products, before])
                    accumulator += products * scale_before
            slot = following
    if SCALE_WEIGHTS:
        accumulator, before = warpgroup_mma_wait(0, deps=[accumulator, before])
    return accumulator, slot, phase


@gluon.jit
def read_stage(
    slot, lane, row, BN: gl.constexpr, K_TILES: gl.constexpr, GROUP: gl.constexpr, FRACTIONAL: gl.constexpr,
    HALF: gl.constexpr, WORDS: gl.constexpr, SCALES: gl.constexpr, SCALE_BYTES: gl.constexpr,
):  # fmt: skip
    """For each tile of a stage the lane's words, and the zeros and scales of its groups."""
    words = ()
    scales = ()
    for tile in gl.static_range(K_TILES):
        words = words + (read_words(slot * (BN * K_TILES * 32), lane, WORDS + tile * 2048),)  # type: ignore[assignment]  # noqa: RUF005
        if (tile * 64) % GROUP == 0:
            one = read_scales(
                slot * SCALE_BYTES, row, SCALES + tile * 64 // GROUP * (BN * 4), BN * 4, GROUP, FRACTIONAL, HALF,
                True,
            )  # fmt: skip
            scales = scales + (one,)  # type: ignore[assignment]  # noqa: RUF005
        else:
            scales = scales + (scales[tile - 1],)  # type: ignore[assignment]  # noqa: RUF005
    return words, scales


@gluon.jit
def sliced_mainloop(
    x_ring, slot, phase, piece, piece_end, lane, row,
    BN: gl.constexpr, BM: gl.constexpr, GROUP: gl.constexpr, FRACTIONAL: gl.constexpr, HALF: gl.constexpr,
    STAGES: gl.constexpr, K_TILES: gl.constexpr, WORDS: gl.constexpr, SCALES: gl.constexpr,
    SCALE_BYTES: gl.constexpr, FULL: gl.constexpr, EMPTY: gl.constexpr, MMA: gl.constexpr,
):  # fmt: skip
    """The products of stages `piece` to `piece_end`; two of 16 columns in flight.

    With three in flight, or with the next stage's words read two products ahead and not three, the compiler
    lets each product end before the next; a test looks.
    """
    slices: gl.constexpr = 4 * K_TILES
    accumulator = gl.zeros([BN, BM], gl.float32, MMA)
    mbarrier_wait(FULL + slot * 8, phase)
    words, scales = read_stage(
        slot, lane, row, BN, K_TILES, GROUP, FRACTIONAL, HALF, WORDS, SCALES, SCALE_BYTES
    )
    before = wgmma_operand(
        words[0], scales[0], words[0], scales[0], 0, BN, 1, GROUP, FRACTIONAL, HALF, True, MMA
    )
    oldest = before
    for stage in range(piece, piece_end):
        wraps = slot + 1 == STAGES
        following = gl.where(wraps, 0, slot + 1)
        more_words = words
        more_scales = scales
        for j in gl.static_range(slices):
            weight = wgmma_operand(
                words[j // 4], scales[j // 4], words[j // 4], scales[j // 4], j, BN, 1, GROUP,
                FRACTIONAL, HALF, True, MMA,
            )  # fmt: skip
            x_slice = x_ring.index(slot).slice(j * 16, 16, dim=1).permute((1, 0))
            products = warpgroup_mma(weight, x_slice, accumulator, is_async=True)
            accumulator, oldest = warpgroup_mma_wait(2, deps=[products, oldest])
            oldest = before
            before = weight
            if j == 1:
                # What is in flight now is of this stage.
                previous = gl.where(slot == 0, STAGES - 1, slot - 1)
                mbarrier_arrive(EMPTY + previous * 8, stage > piece)
            if j == slices - 3:
                phase = gl.where(wraps, phase ^ 1, phase)
                # Behind the last stage of a piece this reads what is not used.
                if stage + 1 < piece_end:
                    mbarrier_wait(FULL + following * 8, phase)
                more_words, more_scales = read_stage(
                    following, lane, row, BN, K_TILES, GROUP, FRACTIONAL, HALF, WORDS, SCALES, SCALE_BYTES
                )
        words = more_words
        scales = more_scales
        slot = following
    accumulator, oldest, before = warpgroup_mma_wait(0, deps=[accumulator, oldest, before])
    return accumulator, slot, phase
