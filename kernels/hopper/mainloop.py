"""Main loop of the stream-K kernel: words decoded to register operands, wgmma, fp32 accumulators.

    ring slot --ld.shared--> words --decode--> A operand in registers --+
    ring slot (x) ----------- B operand in shared memory, transposed ---+--> wgmma

The asynchronous wgmmas of a warpgroup wait in a queue with room for two or three of K=16; a warpgroup that
issues another stalls until there is room. So if all wgmmas of a chunk are issued before the next chunk is
decoded, only the last of them hide the decoding. There are therefore three schedules:

    chunked_mainloop  decode 64 or 128 columns, then issue their wgmmas: up to 64 rows of x, which is bound
                      by bytes from HBM, or where the scale multiplies the sums
    sliced_mainloop   decode 16 columns, issue their wgmma, decode the next 16: more rows. A stage's words
                      are read while wgmmas of the stage before are in flight
    halves_mainloop   decode 128 columns and multiply them by half of x at a time: 256 rows, where the scale
                      multiplies the sums, whose registers leave none for a second chunk

A weight that is stored in E4M3 is not decoded: `shared_mainloop` and `shared_halves_mainloop` have wgmma take
both operands from the ring.

In all loops, all lanes wait on full mbarriers, and one lane of each warp arrives at empty mbarriers
(`ptx.py`). The loops return the accumulator [BN, BM] or both halves of it, and the slot and the phase that
follow their last stage. The kernel in `invariant.py` has a loop of its own.
"""

from ..triton_imports import gl, gluon, warpgroup_mma, warpgroup_mma_wait
from .operand import e4m3_operand, e4m3_words, wgmma_operand
from .ptx import mbarrier_arrive, mbarrier_wait


@gluon.constexpr_function
def lane_layout(warps):
    """The layout of [row / 16, r, t]: one element per thread."""
    return gl.DistributedLinearLayout(
        reg_bases=[],
        lane_bases=[[0, 0, 1], [0, 0, 2], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        warp_bases=[[1, 0, 0], [2, 0, 0], [4, 0, 0]][: 2 if warps == 4 else 3],
        block_bases=[],
        shape=[warps, 8, 4],
    )


@gluon.jit
def lane_offsets(t):
    """Return the byte offsets of each lane in a stage's words and in its scales."""
    spread: gl.constexpr = lane_layout(t.BN // 16)
    of_warp: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, spread))
    of_r: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, spread))
    of_t: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, spread))
    warp = gl.expand_dims(gl.expand_dims(gl.arange(0, t.BN // 16, of_warp), 1), 2)
    r = gl.expand_dims(gl.expand_dims(gl.arange(0, 8, of_r), 0), 2)
    quad = gl.expand_dims(gl.expand_dims(gl.arange(0, 4, of_t), 0), 1)
    return t.DECODER.lane_offsets(warp, r, quad, t)


@gluon.jit
def read_operand(slot, lane, row, CHUNK: gl.constexpr, t, smem):
    """Return chunk `CHUNK` of a slot: the operand, and the scales of its sums if sums are scaled."""
    tile: gl.constexpr = CHUNK * t.SLICES // 4
    words = t.DECODER.read_words(slot, lane, tile, t, smem)
    scales = t.DECODER.read_scales(slot, row, tile, t, smem)
    more_words = words
    more_scales = scales
    if t.SLICES == 8:
        more_words = t.DECODER.read_words(slot, lane, tile + 1, t, smem)
        if t.SCALE_COLUMNS < 128:
            more_scales = t.DECODER.read_scales(slot, row, tile + 1, t, smem)
    if t.X_BITS == 8:
        operand = e4m3_words(words, more_words, CHUNK, t)
    else:
        operand = wgmma_operand(words, scales, more_words, more_scales, CHUNK, t)
    if t.SCALE_WEIGHTS:
        return operand, 1.0
    else:
        return operand, t.DECODER.read_sum_scales(slot, CHUNK, t, smem)


@gluon.jit
def as_operand(weight, t):
    """Return the result of `read_operand` in the form that wgmma takes."""
    if t.X_BITS == 8:
        return e4m3_operand(weight, t)
    else:
        return weight


@gluon.jit
def chunked_mainloop(x_ring, slot, phase, k_stage, k_end, lane, row, t, smem):
    """Multiply w . x^T over stages `k_stage` to `k_end` of K, whole iterations, chunk by chunk.

    An iteration takes an even number of chunks, so that the operand in flight and the next operand have
    registers of their own. One chunk is decoded while the wgmmas of the chunk before run.
    """
    accumulator = gl.zeros([t.BN, t.BM], gl.float32, t.MMA)
    mbarrier_wait(smem.FULL + slot * 8, phase)
    weight, scale = read_operand(slot, lane, row, 0, t, smem)
    before = weight
    for first in range(k_stage, k_end, t.ITER_STAGES):
        for i in gl.static_range(t.ITER_STAGES):
            stage = first + i
            wraps = slot + 1 >= t.STAGES
            following = gl.where(wraps, slot + 1 - t.STAGES, slot + 1)
            for chunk in gl.static_range(t.CHUNKS):
                x_chunk = x_ring.index(slot).slice(chunk * 16 * t.SLICES, 16 * t.SLICES, dim=1)
                products = warpgroup_mma(
                    as_operand(weight, t),
                    x_chunk.permute((1, 0)),
                    accumulator,
                    use_acc=t.SCALE_WEIGHTS,
                    is_async=True,
                )
                scale_before = scale
                if t.SCALE_WEIGHTS:
                    # At most this chunk is in flight: the one before it is done.
                    accumulator, before = warpgroup_mma_wait(1, deps=[products, before])
                before = weight
                if chunk == 0:
                    previous = gl.where(slot - 1 < 0, slot - 1 + t.STAGES, slot - 1)
                    mbarrier_arrive(smem.EMPTY + previous * 8, stage > k_stage)
                if chunk + 1 < t.CHUNKS:
                    weight, scale = read_operand(slot, lane, row, chunk + 1, t, smem)
                else:
                    # Behind the last stage this decodes what is not used.
                    phase = gl.where(wraps, phase ^ 1, phase)
                    if stage + 1 < k_end:
                        mbarrier_wait(smem.FULL + following * 8, phase)
                    weight, scale = read_operand(following, lane, row, 0, t, smem)
                if not t.SCALE_WEIGHTS:
                    products, before = warpgroup_mma_wait(0, deps=[products, before])
                    accumulator += products * scale_before
            slot = following
    if t.SCALE_WEIGHTS:
        accumulator, before = warpgroup_mma_wait(0, deps=[accumulator, before])
    return accumulator, slot, phase


@gluon.jit
def read_chunk(slot, lane, CHUNK: gl.constexpr, t, smem):
    """Read chunk `CHUNK` of a slot, undecoded: the words of its tiles, and the scales of its sums."""
    tile: gl.constexpr = CHUNK * t.SLICES // 4
    words = t.DECODER.read_words(slot, lane, tile, t, smem)
    more_words = words
    if t.SLICES == 8:
        more_words = t.DECODER.read_words(slot, lane, tile + 1, t, smem)
    return words, more_words, t.DECODER.read_sum_scales(slot, CHUNK, t, smem)


@gluon.jit
def halves_mainloop(x_ring, slot, phase, k_stage, k_end, lane, row, t, smem):
    """`chunked_mainloop` with scaled sums for two halves of x, one after the other: two accumulators.

    The registers hold the sums of one chunk over one half of x, but not another chunk's operand. While one
    warpgroup decodes or adds to its accumulator, the wgmmas of the other warpgroup run.
    """
    HALF: gl.constexpr = t.BM // 2
    low = gl.zeros([t.BN, HALF], gl.float32, t.MMA)
    high = gl.zeros([t.BN, HALF], gl.float32, t.MMA)
    mbarrier_wait(smem.FULL + slot * 8, phase)
    words, more_words, scale = read_chunk(slot, lane, 0, t, smem)
    for stage in range(k_stage, k_end):
        wraps = slot + 1 >= t.STAGES
        following = gl.where(wraps, slot + 1 - t.STAGES, slot + 1)
        for chunk in gl.static_range(t.CHUNKS):
            weight = e4m3_words(words, more_words, chunk, t)
            x_chunk = x_ring.index(slot).slice(chunk * 16 * t.SLICES, 16 * t.SLICES, dim=1)
            x_low = x_chunk.slice(0, HALF, dim=0).permute((1, 0))
            products = warpgroup_mma(as_operand(weight, t), x_low, low, use_acc=False, is_async=True)
            if chunk == 0:
                previous = gl.where(slot - 1 < 0, slot - 1 + t.STAGES, slot - 1)
                mbarrier_arrive(smem.EMPTY + previous * 8, stage > k_stage)
            products, weight = warpgroup_mma_wait(0, deps=[products, weight])
            low += products * scale
            # Nothing is in flight: this keeps the next wgmmas behind these sums, whose registers they take.
            low, weight = warpgroup_mma_wait(0, deps=[low, weight])
            x_high = x_chunk.slice(HALF, HALF, dim=0).permute((1, 0))
            products = warpgroup_mma(as_operand(weight, t), x_high, high, use_acc=False, is_async=True)
            scale_before = scale
            products, weight = warpgroup_mma_wait(0, deps=[products, weight])
            if chunk + 1 < t.CHUNKS:
                words, more_words, scale = read_chunk(slot, lane, chunk + 1, t, smem)
            else:
                # Behind the last stage this reads what is not used.
                phase = gl.where(wraps, phase ^ 1, phase)
                if stage + 1 < k_end:
                    mbarrier_wait(smem.FULL + following * 8, phase)
                words, more_words, scale = read_chunk(following, lane, 0, t, smem)
            high += products * scale_before
            high, words = warpgroup_mma_wait(0, deps=[high, words])
        slot = following
    return low, high, slot, phase


@gluon.jit
def read_stage(slot, lane, row, t, smem):
    """Read the lane's words and scales for each tile of a stage."""
    words = ()
    scales = ()
    for tile in gl.static_range(t.K_TILES):
        one_words = t.DECODER.read_words(slot, lane, tile, t, smem)
        words = words + (one_words,)  # type: ignore[assignment]  # noqa: RUF005
        if (tile * 64) % t.SCALE_COLUMNS == 0:
            one_scales = t.DECODER.read_scales(slot, row, tile, t, smem)
            scales = scales + (one_scales,)  # type: ignore[assignment]  # noqa: RUF005
        else:
            scales = scales + (scales[tile - 1],)  # type: ignore[assignment]  # noqa: RUF005
    return words, scales


@gluon.jit
def sliced_mainloop(x_ring, slot, phase, k_stage, k_end, lane, row, t, smem):
    """Multiply w . x^T over stages `k_stage` to `k_end` of K by slices; two wgmmas of K=16 are in flight.

    With three wgmmas in flight, or with the next stage's words read two wgmmas ahead instead of three, the
    compiler serializes the wgmmas; a test checks this.
    """
    slices: gl.constexpr = 4 * t.K_TILES
    accumulator = gl.zeros([t.BN, t.BM], gl.float32, t.MMA)
    mbarrier_wait(smem.FULL + slot * 8, phase)
    words, scales = read_stage(slot, lane, row, t, smem)
    before = wgmma_operand(words[0], scales[0], words[0], scales[0], 0, t)
    oldest = before
    for stage in range(k_stage, k_end):
        wraps = slot + 1 == t.STAGES
        following = gl.where(wraps, 0, slot + 1)
        more_words = words
        more_scales = scales
        for j in gl.static_range(slices):
            weight = wgmma_operand(words[j // 4], scales[j // 4], words[j // 4], scales[j // 4], j, t)
            x_slice = x_ring.index(slot).slice(j * 16, 16, dim=1).permute((1, 0))
            products = warpgroup_mma(weight, x_slice, accumulator, is_async=True)
            accumulator, oldest = warpgroup_mma_wait(2, deps=[products, oldest])
            oldest = before
            before = weight
            if j == 1:
                # What is in flight now is of this stage.
                previous = gl.where(slot == 0, t.STAGES - 1, slot - 1)
                mbarrier_arrive(smem.EMPTY + previous * 8, stage > k_stage)
            if j == slices - 3:
                phase = gl.where(wraps, phase ^ 1, phase)
                # Behind the last stage this reads what is not used.
                if stage + 1 < k_end:
                    mbarrier_wait(smem.FULL + following * 8, phase)
                more_words, more_scales = read_stage(following, lane, row, t, smem)
        words = more_words
        scales = more_scales
        slot = following
    accumulator, oldest, before = warpgroup_mma_wait(0, deps=[accumulator, oldest, before])
    return accumulator, slot, phase


@gluon.jit
def shared_mainloop(x_ring, words_ring, slot, phase, k_stage, k_end, t, smem):
    """Multiply w . x^T over stages `k_stage` to `k_end` of K, both operands in shared memory.

    The sums of 128 columns, for which E4M3 has 14 bits, are multiplied by the scales of the weight's rows and
    added to the accumulator in fp32. Meanwhile wgmmas of the other warpgroup run, or of another CTA.
    """
    accumulator = gl.zeros([t.BN, t.BM], gl.float32, t.MMA)
    for _stage in range(k_stage, k_end):
        mbarrier_wait(smem.FULL + slot * 8, phase)
        scale = t.DECODER.read_sum_scales(slot, 0, t, smem)
        for chunk in gl.static_range(t.CHUNKS):
            weight = words_ring.index(slot).slice(chunk * 128, 128, dim=1)
            x_chunk = x_ring.index(slot).slice(chunk * 128, 128, dim=1).permute((1, 0))
            products = warpgroup_mma(weight, x_chunk, accumulator, use_acc=False, is_async=True)
            products, scale = warpgroup_mma_wait(0, deps=[products, scale])
            if chunk + 1 == t.CHUNKS:
                mbarrier_arrive(smem.EMPTY + slot * 8, slot >= 0)
            accumulator += products * scale
        wraps = slot + 1 >= t.STAGES
        slot = gl.where(wraps, slot + 1 - t.STAGES, slot + 1)
        phase = gl.where(wraps, phase ^ 1, phase)
    return accumulator, slot, phase


@gluon.jit
def shared_halves_mainloop(x_ring, words_ring, slot, phase, k_stage, k_end, t, smem):
    """`shared_mainloop` for two halves of x, one after the other: two accumulators."""
    HALF: gl.constexpr = t.BM // 2
    low = gl.zeros([t.BN, HALF], gl.float32, t.MMA)
    high = gl.zeros([t.BN, HALF], gl.float32, t.MMA)
    for _stage in range(k_stage, k_end):
        mbarrier_wait(smem.FULL + slot * 8, phase)
        scale = t.DECODER.read_sum_scales(slot, 0, t, smem)
        for chunk in gl.static_range(t.CHUNKS):
            weight = words_ring.index(slot).slice(chunk * 128, 128, dim=1)
            x_chunk = x_ring.index(slot).slice(chunk * 128, 128, dim=1)
            x_low = x_chunk.slice(0, HALF, dim=0).permute((1, 0))
            products = warpgroup_mma(weight, x_low, low, use_acc=False, is_async=True)
            products, scale = warpgroup_mma_wait(0, deps=[products, scale])
            low += products * scale
            # Nothing is in flight: this keeps the next wgmmas behind these sums, whose registers they take.
            low = warpgroup_mma_wait(0, deps=[low])
            x_high = x_chunk.slice(HALF, HALF, dim=0).permute((1, 0))
            products = warpgroup_mma(weight, x_high, high, use_acc=False, is_async=True)
            products, scale = warpgroup_mma_wait(0, deps=[products, scale])
            if chunk + 1 == t.CHUNKS:
                mbarrier_arrive(smem.EMPTY + slot * 8, slot >= 0)
            high += products * scale
            high = warpgroup_mma_wait(0, deps=[high])
        wraps = slot + 1 >= t.STAGES
        slot = gl.where(wraps, slot + 1 - t.STAGES, slot + 1)
        phase = gl.where(wraps, phase ^ 1, phase)
    return low, high, slot, phase
