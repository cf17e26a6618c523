"""Matrix product with stream-K on Hopper, in Gluon: y [M, N] = x [M, K] @ w.T, w [N, K] packed.

M may be any number. Batch-invariant serving needs `invariant.py`: the split of K depends on M here.

The decoder (`decoder.py`) defines the bytes of w, and `gemm.py` draws a tile's path through this kernel.
"Swap AB": the weight is wgmma's M operand, decoded in registers, and x its N operand, so that sixteen rows of
x cost wgmmas of N=16.

Stream-K (Osama et al., 2023): tiles of y are numbered down M, then along N, and each has as many iterations
as K has 128 or 256 columns; CTA i of C starts at about iteration i * total / C, so that it may finish one
tile, do others whole and begin one more:

    CTA 0 |-- tile 0 --|- tile 1           the CTA with a tile's first iteration owns it: it adds the others'
    CTA 1               -|-- tile 2 --|-   partial sums to its own, in order of K, so the bits are the same
    CTA 2                    tile 3 ---|   on every run

* Partial sums cost as much time as 200 to 400 columns of K: to send, to wait for and to add. If the same
split recurs every two, three or four CTAs, start offsets give the CTAs that send partial sums less to
multiply (`stream_k_config.balanced_start_offsets`). Or tail partials are prefetched: `tail_prefetch.py`.
* An owner waits only for CTAs with higher numbers, which the grid starts earlier (it counts backwards), so an
owner never waits for a CTA that has yet to be scheduled. If there are as many CTAs as tiles (data-parallel),
no CTA waits for another.
* All CTAs read x. If several CTAs are at the same columns at the same time, L2 serves them with one read from
  memory. A number of CTAs that splits all tiles in a few equal ways is therefore better than a number that
  keeps every SM busy: 80 tiles of 256 rows of x by 120 CTAs, three for two tiles, take 40 us, by 132 CTAs 51
  (H200, November 2026).
* Warp specialization: one producer warp issues TMA loads, one or two warpgroups consume. No CTA barrier in
  the main loop: each warp waits and arrives at mbarriers by itself (`ptx.py`).
* PDL (programmatic dependent launch): weights are loaded before the kernel ahead has ended; activations, and
  everything that is written, wait for its end.

Run-time integers are separate kernel arguments because Triton 3.6 ignores `do_not_specialize` for integers in
tuples, and would compile again for new values. Triton specializes on no floating-point number.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..triton_imports import (
    TensorDescriptor,
    aggregate,
    gdc_launch_dependents,
    gdc_wait,
    gl,
    gluon,
    mbarrier,
    reinterpret,
    thread_barrier,
    triton,
)
from .decoder import Decoder
from .epilogue import (
    Exchange,
    Output,
    partial_floats,
    partial_offsets,
    reduce_partials,
    scale_rows,
    send_partials,
    split_accumulator,
    store_y,
)
from .mainloop import (
    chunked_mainloop,
    halves_mainloop,
    lane_offsets,
    shared_halves_mainloop,
    shared_mainloop,
    sliced_mainloop,
)
from .packed_operand import PackedOperand
from .ptx import init_mbarriers, mbarrier_arrive, mbarrier_expect, mbarrier_wait
from .reorder_x import REORDERING_WARPS, reordering_partition
from .tail_prefetch import MAX_TAILS, add_tail, prefetch_tail, send_tail, signal_tails
from .tile import HopperTile
from .tma_loads import Ring, activation_bytes, full_bytes
from .traits import Slots, Smem, Traits, iter_stages, slots_of

OFFSETS_ROWS = gl.constexpr(128)
"""Rows of x in a tile from which on CTAs may have start offsets, which cost 0.05 us to work out."""
FLAT_BYTES = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def fast_divide(a, b, inverse):
    """Return a // b for 0 <= a < 2^22, with the fp32 number nearest to 1 / b.

    Three integer divisions one after another take 0.4 us, before the first load is issued.
    """
    guess = (a.to(gl.float32) * inverse).to(gl.int32)
    rest = a - guess * b
    return guess + (rest >= b).to(gl.int32) - (rest < 0).to(gl.int32)


@aggregate
class Decomposition:
    """How the iterations of all tiles are split over CTAs; each `inv_` is for `fast_divide`."""

    iters_per_tile: gl.tensor
    total_iters: gl.tensor
    num_ctas: gl.tensor
    period: gl.tensor
    start_offsets: gl.tensor
    inv_iters_per_tile: gl.tensor
    inv_total: gl.tensor
    inv_ctas: gl.tensor
    inv_period: gl.tensor

    @gluon.constexpr_function
    def __init__(
        self, iters_per_tile, total_iters, num_ctas, period, start_offsets, inv_iters_per_tile, inv_total,
        inv_ctas, inv_period,
    ):  # fmt: skip
        self.iters_per_tile = iters_per_tile
        self.total_iters = total_iters
        self.num_ctas = num_ctas
        self.period = period
        self.start_offsets = start_offsets
        self.inv_iters_per_tile = inv_iters_per_tile
        self.inv_total = inv_total
        self.inv_ctas = inv_ctas
        self.inv_period = inv_period

    @gluon.jit
    def first_iter(self, cta, OFFSETS: gl.constexpr):
        """Return a CTA's first iteration: the equal share, plus its signed byte of `start_offsets`."""
        begin = fast_divide(cta * self.total_iters, self.num_ctas, self.inv_ctas)
        if OFFSETS:
            place = cta - fast_divide(cta, self.period, self.inv_period) * self.period
            begin += (self.start_offsets << (24 - place * 8)) >> 24
        return begin

    @gluon.jit
    def tile_of(self, iteration):
        return fast_divide(iteration, self.iters_per_tile, self.inv_iters_per_tile)

    @gluon.jit
    def owner_of(self, tile):
        """Return the CTA with the tile's first iteration: the last CTA that starts no later than the tile.

        Start offsets move no start from one tile into another, so equal shares give the answer.
        """
        first = tile * self.iters_per_tile + 1
        return fast_divide(first * self.num_ctas - 1, self.total_iters, self.inv_total)

    @gluon.jit
    def last_cta_of(self, tile):
        """Return the CTA with the tile's last iteration."""
        end = (tile + 1) * self.iters_per_tile
        return fast_divide(end * self.num_ctas - 1, self.total_iters, self.inv_total)


@aggregate
class Work:
    """The stages of K that a CTA handles, tile by tile.

    tile_n, tile_m, k  of the first stage
    k_begin            where in K the next tiles begin: 0, or behind the heads for a CTA of tails
    stages             how many
    stages_per_tile    of all K
    tiles_m            tiles of y down M
    """

    tile_n: gl.tensor
    tile_m: gl.tensor
    k: gl.tensor
    k_begin: gl.tensor | gl.constexpr
    stages: gl.tensor
    stages_per_tile: gl.tensor
    tiles_m: gl.tensor

    @gluon.constexpr_function
    def __init__(self, tile_n, tile_m, k, k_begin, stages, stages_per_tile, tiles_m):
        self.tile_n = tile_n
        self.tile_m = tile_m
        self.k = k
        self.k_begin = gl.constexpr(k_begin) if isinstance(k_begin, int) else k_begin
        self.stages = stages
        self.stages_per_tile = stages_per_tile
        self.tiles_m = tiles_m

    @gluon.jit
    def next_stage(self, tile_n, tile_m, k):
        """Return the place one stage on: along K, then the next rows of x, then the next of the weight."""
        k += 1
        over = k == self.stages_per_tile
        k = gl.where(over, self.k_begin, k)
        tile_m = gl.where(over, tile_m + 1, tile_m)
        over = tile_m == self.tiles_m
        return gl.where(over, tile_n + 1, tile_n), gl.where(over, 0, tile_m), k


@gluon.jit
def load_stage(
    ring, slot, tile_n, tile_m, k, pred, WEIGHTS: gl.constexpr, ACTIVATIONS: gl.constexpr, t, smem
):
    """Start loading stage `k` of a tile into a slot of the ring."""
    if WEIGHTS:
        count: gl.constexpr = full_bytes(
            ring.words_desc.block_shape, ring.scale_desc.block_shape, ring.x_desc.block_shape, t.REORDER_X,
            t.X_BITS, t.WORD_BYTES,
        )  # fmt: skip
        mbarrier_expect(slot * 8 + k * 0, k * 0 + pred, smem.FULL, count)
        ring.load_weights(slot, k, tile_n, pred, t)
    if ACTIVATIONS:
        if t.REORDER_X:
            count_x: gl.constexpr = activation_bytes(ring.x_desc.block_shape)
            mbarrier_expect(slot * 8 + k * 0, k * 0 + pred, smem.X_FULL, count_x)
        ring.load_activations(slot, k, tile_m, pred, t)


@gluon.jit
def fill_ring(ring, work, WEIGHTS: gl.constexpr, ACTIVATIONS: gl.constexpr, t, smem):
    """Start loading into all slots of the empty ring, as the prologue; return the stage that follows."""
    tile_n = work.tile_n
    tile_m = work.tile_m
    k = work.k
    for slot in gl.static_range(t.STAGES):
        load_stage(ring, slot, tile_n, tile_m, k, slot < work.stages, WEIGHTS, ACTIVATIONS, t, smem)
        tile_n, tile_m, k = work.next_stage(tile_n, tile_m, k)
    return tile_n, tile_m, k


@gluon.jit
def producer_partition(ring, exchange, work, TAILS: gl.constexpr, t, smem):
    """Run the one warp that issues the TMA loads."""
    # The weights do not depend on the kernel before this one, so the first of them need not wait for its end;
    # the activations do.
    fill_ring(ring, work, True, False, t, smem)
    gdc_wait()
    tile_n, tile_m, k = fill_ring(ring, work, False, True, t, smem)
    slot = 0
    phase = 0
    for _stage in range(t.STAGES, work.stages):
        mbarrier_wait(smem.EMPTY + slot * 8, phase)
        load_stage(ring, slot, tile_n, tile_m, k, True, True, True, t, smem)
        wraps = slot + 1 == t.STAGES
        slot = gl.where(wraps, 0, slot + 1)
        phase = gl.where(wraps, phase ^ 1, phase)
        tile_n, tile_m, k = work.next_stage(tile_n, tile_m, k)
    if TAILS:
        if work.k_begin > 0:
            signal_tails(exchange, work.stages // (work.stages_per_tile - work.k_begin), smem)
        else:
            prefetch_tail(exchange, work.stages, t, smem)


@gluon.jit
def consumer_partition(
    x_ring, words_ring, memory, table, output, exchange, work, TAILS: gl.constexpr, t, smem
):
    """Run the warpgroups that decode and multiply: main loop and epilogue of each tile, or part of a tile."""
    if smem.X > 0:
        t.DECODER.fill_table(memory, table, t, smem)
        thread_barrier()
    if not t.IN_SHARED:
        lane, row = lane_offsets(t)
    tile_n = work.tile_n
    tile_m = work.tile_m
    k_stage = work.k
    owner = exchange.owner
    left = work.stages
    slot = work.stages * 0
    phase = 0
    sent = smem.SENT + work.stages * 0
    while left > 0:
        k_end = gl.minimum(work.stages_per_tile, k_stage + left)
        if t.IN_SHARED and t.HALVES == 2:
            accumulator, high, slot, phase = shared_halves_mainloop(
                x_ring, words_ring, slot, phase, k_stage, k_end, t, smem
            )
        elif t.IN_SHARED:
            accumulator, slot, phase = shared_mainloop(
                x_ring, words_ring, slot, phase, k_stage, k_end, t, smem
            )
        elif t.SLICES == 1:
            accumulator, slot, phase = sliced_mainloop(
                x_ring, slot, phase, k_stage, k_end, lane, row, t, smem
            )
        elif t.HALVES == 2:
            accumulator, high, slot, phase = halves_mainloop(
                x_ring, slot, phase, k_stage, k_end, lane, row, t, smem
            )
        else:
            accumulator, slot, phase = chunked_mainloop(
                x_ring, slot, phase, k_stage, k_end, lane, row, t, smem
            )
        if not t.IN_SHARED:
            previous = gl.where(slot - 1 < 0, slot - 1 + t.STAGES, slot - 1)
            mbarrier_arrive(smem.EMPTY + previous * 8, slot >= 0)
        if t.FACTOR_BY_ROW:
            accumulator = scale_rows(accumulator, output, tile_m * t.BM, t)
        fragments = split_accumulator(accumulator, t.BN, t.BM // t.HALVES)
        if t.HALVES == 2:
            high = scale_rows(high, output, tile_m * t.BM + t.BM // 2, t)
            fragments = fragments + split_accumulator(high, t.BN, t.BM // 2)
        offsets = partial_offsets(t.BN)
        if k_stage > 0:
            if TAILS:
                send_tail(fragments, exchange.partials, offsets, owner, sent, t)
                owner += 1
                sent += 8
            else:
                send_partials(fragments, exchange, offsets, t)
        else:
            # Who has the first iteration of a tile owns it.
            if TAILS:
                fragments = add_tail(fragments, slot, phase, offsets, t, smem)
            elif k_end < work.stages_per_tile:
                fragments = reduce_partials(fragments, exchange, offsets, t)
            store_y(fragments, output, tile_n, tile_m, t)
        left -= k_end - k_stage
        k_stage = work.k_begin
        tile_m += 1
        over = tile_m == work.tiles_m
        tile_n = gl.where(over, tile_n + 1, tile_n)
        tile_m = gl.where(over, 0, tile_m)


class Form(NamedTuple):
    """Compile-time parameters of the kernel.

    scale_weights: whether scales multiply weights; else they multiply sums
    vector_store:  whether rows of y have whole groups of four
    tails:         whether further CTAs, beyond one per tile, have the tails of several tiles
    """

    tile: "Tile"
    decoder: Decoder
    scale_weights: bool
    vector_store: bool
    tails: bool

    @property
    def cache_key(self) -> str:
        """Triton's cache key, so that no compiled kernel outlives the source of a decoder."""
        return _cache_key(self)


@lru_cache(maxsize=4096)
def _cache_key(form: Form) -> str:
    """Return `Form.cache_key`; Triton asks for it at every launch."""
    return f"{form!r}-{form.decoder.cache_key}"


@gluon.jit(
    do_not_specialize=[
        "M", "N", "tiles_m", "iters_per_tile", "total_iters", "num_ctas", "period", "start_offsets",
        "head_iters", "tails_per_cta",
    ],
    repr=lambda form: form.constants["FORM"].decoder.name + "_stream_k_kernel",
)  # fmt: skip
def stream_k_kernel(
    x_desc, words_desc, scale_desc, table, y, factor, partials, semaphores, M, N,
    tiles_m, iters_per_tile, total_iters, num_ctas, period, start_offsets, head_iters, tails_per_cta,
    inverses, FORM: gl.constexpr,
):  # fmt: skip
    """Grid: `num_ctas` CTAs. Parameters are as `launch` gives them; inverses: for `fast_divide`."""
    TAILS: gl.constexpr = FORM.tails
    inv_tiles_m, inv_iters_per_tile, inv_total, inv_ctas, inv_period = inverses
    t = Traits(FORM.tile, FORM.decoder, FORM.scale_weights)
    smem = Smem(t, words_desc.block_shape, scale_desc.block_shape)
    split = Decomposition(
        iters_per_tile, total_iters, num_ctas, period, start_offsets, inv_iters_per_tile, inv_total, inv_ctas,
        inv_period,
    )  # fmt: skip
    cta = gl.num_programs(0) - 1 - gl.program_id(0)
    if TAILS:
        # One CTA a tile for the heads, then those of the tails.
        tail_cta = cta - fast_divide(total_iters, iters_per_tile, inv_iters_per_tile)
        begin = gl.where(tail_cta >= 0, head_iters, 0)
        tile = gl.where(tail_cta >= 0, tail_cta * tails_per_cta, cta)
        iters = gl.where(tail_cta >= 0, (iters_per_tile - head_iters) * tails_per_cta, head_iters)
        stages = iters * t.ITER_STAGES
        k_begin = begin * t.ITER_STAGES
    else:
        begin = split.first_iter(cta, t.BM >= OFFSETS_ROWS)
        end = split.first_iter(cta + 1, t.BM >= OFFSETS_ROWS)
        tile = split.tile_of(begin)
        stages = (end - begin) * t.ITER_STAGES
        begin -= tile * iters_per_tile
        k_begin = 0
    tile_n = tile
    tile_m = tile * 0
    if tiles_m > 1:
        tile_n = fast_divide(tile, tiles_m, inv_tiles_m)
        tile_m = tile - tile_n * tiles_m
    work = Work(
        tile_n, tile_m, begin * t.ITER_STAGES, k_begin, stages, iters_per_tile * t.ITER_STAGES, tiles_m
    )

    memory = gl.allocate_shared_memory(gl.int8, [smem.TOTAL // 1024, 1024], FLAT_BYTES)
    x_ring = slots_of(memory, x_desc, smem.X, smem)
    words_ring = slots_of(memory, words_desc, smem.WORDS, smem)
    scale_ring = slots_of(memory, scale_desc, smem.SCALES, smem)
    mbarriers = reinterpret(memory, gl.int64, [smem.TOTAL // 8, 1], mbarrier.MBarrierLayout())
    full = Slots(mbarriers, smem.FULL // 8)
    ring = Ring(x_desc, words_desc, scale_desc, words_ring, scale_ring, x_ring, full)
    init_mbarriers(M, t, smem, MAX_TAILS if TAILS else 0, REORDERING_WARPS if t.REORDER_X else 0)
    thread_barrier()
    gdc_launch_dependents()
    owner = tile
    last_cta = cta
    if not TAILS:
        owner = split.owner_of(tile)
        last_cta = split.last_cta_of(split.tile_of(end - 1))
    exchange = Exchange(partials, semaphores, cta, owner, last_cta)
    output = Output(y, M, N, factor, FORM.vector_store)
    if t.REORDER_X:
        gl.warp_specialize([
            (consumer_partition, (x_ring, words_ring, memory, table, output, exchange, work, TAILS, t, smem)),
            (producer_partition, (ring, exchange, work, TAILS, t, smem)),
            (reordering_partition, (work, t, smem)),
        ], [1, REORDERING_WARPS], [24, 40])  # fmt: skip
    else:
        gl.warp_specialize([
            (consumer_partition, (x_ring, words_ring, memory, table, output, exchange, work, TAILS, t, smem)),
            (producer_partition, (ring, exchange, work, TAILS, t, smem)),
        ], [1], [24])  # fmt: skip


@dataclass(frozen=True)
class Tile(HopperTile):
    """`slices` is 4 or 8 for `chunked_mainloop`, 1 for `sliced_mainloop`."""

    @property
    def iter_columns(self) -> int:
        """Columns of K in an iteration."""
        return 64 * self.k_tiles * iter_stages(self.k_tiles, self.slices)

    @property
    def partial_floats(self) -> int:
        """fp32 numbers of scratch memory for the partial sums of a CTA."""
        return partial_floats(self.n, self.m)


@dataclass(frozen=True)
class Config:
    """A tile and how the iterations are split over CTAs.

    num_ctas       one for each tile of y, or at most as many as run at once, and at most SEMAPHORES
    start_offsets  by how many iterations later than at an equal share each of so many CTAs, at most four,
                   starts, time after time; within a tile, and the first of them at an equal one
    head_iters     iterations of a tile's own CTA where the CTAs beyond one a tile have the tails of equally
                   many tiles each (`tail_prefetch.py`: n = 64, m >= 128); else 0
    """

    tile: Tile
    num_ctas: int
    start_offsets: tuple[int, ...] = (0,)
    head_iters: int = 0


class Prepared(NamedTuple):
    """What all launches of one weight with one tile have in common.

    compiled       the kernel; None before the first launch of all weights for which it is the same
    compiled_for   its key in `COMPILED`
    activations    the fields of the TMA descriptor of activations, besides their memory and their shape
    words, scales  the TMA descriptors of the weight
    """

    compiled: Any
    compiled_for: tuple[object, ...]
    activations: dict[str, Any]
    words: TensorDescriptor
    scales: TensorDescriptor
    form: Form


def launch(x: Tensor, weight: PackedOperand, y: Tensor, config: Config) -> None:
    """Write x [M, K] @ w.T into y [M, N], in one launch.

    What Python does here counts: no graph covers the products of long prompts. So what does not depend on M
    is worked out once for each weight and tile.
    """
    m, n = y.shape
    split = split_of(m, n, weight.columns, config)
    partials = torch.empty(split.scratch, dtype=torch.float32, device=x.device)
    key = config.tile, config.head_iters > 0, n, x.dtype, y.dtype, alignment(y)
    prepared = weight.prepared.get(key)
    if prepared is None:
        prepared = weight.prepared[key] = prepare(x, weight, y, config)
    arguments = (
        descriptor_of(x, prepared.activations), prepared.words, prepared.scales, weight.table,
        y, weight.factor, partials, weight.semaphores, m, n, *split.counts, split.inverses, prepared.form,
    )  # fmt: skip
    grid = config.num_ctas, 1, 1
    compiled = prepared.compiled
    if compiled is None:
        compiled = stream_k_kernel[grid](*arguments, **config.tile.options())
        COMPILED[prepared.compiled_for] = compiled
        weight.prepared[key] = prepared._replace(compiled=compiled)
    else:
        run = compiled[grid]
        run(*arguments)


def prepare(x: Tensor, weight: PackedOperand, y: Tensor, config: Config) -> Prepared:
    form = form_of(config.tile, weight.decoder, y.shape[1], config.head_iters > 0)
    pointers = weight.table, y, weight.factor, weight.semaphores
    compiled_for = form, x.dtype, y.dtype, x.device.index, *map(alignment, pointers)
    activations, words, scales = weight.descriptors(x, config.tile)
    fields = {**vars(activations), "base": None}  # so that x can be freed
    return Prepared(COMPILED.get(compiled_for), compiled_for, fields, words, scales, form)


def descriptor_of(x: Tensor, fields: dict[str, Any]) -> TensorDescriptor:
    """Return the TMA descriptor of `x`, whose other fields are given.

    It is made without the checks of its class, which take as long as the rest of a launch.
    """
    descriptor = object.__new__(TensorDescriptor)
    vars(descriptor).update(fields, base=x, shape=x.shape, strides=x.stride())
    return descriptor


COMPILED: dict[tuple[object, ...], Any] = {}
"""The compiled kernels, by everything that Triton compiles them for. Triton's own look-up takes about 0.1 ms
of Python a launch, more than most products take on the GPU; no graph covers the products of long prompts.
"""


def alignment(pointer: Tensor | None) -> int | None:
    """Return by how many bytes a tensor's start misses a multiple of 16; kernels may be compiled for 0."""
    return None if pointer is None else pointer.data_ptr() % 16


class Split(NamedTuple):
    """The split of a launch.

    scratch   fp32 numbers for partial sums
    counts    the kernel's arguments from `tiles_m` to `tails_per_cta`
    inverses  of the first four counts and the period
    """

    scratch: int
    counts: tuple[int, ...]
    inverses: tuple[float, ...]


@lru_cache(maxsize=4096)
def split_of(m: int, n: int, columns: int, config: Config) -> Split:
    """Return the split, computed once for all layers of one shape: when a prompt is processed without a CUDA
    graph, the time of Python matters.
    """
    tile, num_ctas, offsets = config.tile, config.num_ctas, config.start_offsets
    tiles_m = triton.cdiv(m, tile.m)
    iters_per_tile = triton.cdiv(columns, tile.iter_columns)
    tiles = tile.num_tiles(m, n)
    total_iters = tiles * iters_per_tile
    tails_per_cta = tiles // (num_ctas - tiles) if config.head_iters else 0
    return Split(
        1 if num_ctas == tiles else num_ctas * tile.partial_floats,
        (
            tiles_m, iters_per_tile, total_iters, num_ctas, len(offsets), packed_bytes(offsets),
            config.head_iters, tails_per_cta,
        ),
        (1 / tiles_m, 1 / iters_per_tile, 1 / total_iters, 1 / num_ctas, 1 / len(offsets)),
    )  # fmt: skip


def packed_bytes(offsets: tuple[int, ...]) -> int:
    """Pack up to four start offsets as the signed bytes of an int32, the first offset lowest."""
    return int.from_bytes(bytes(offset & 255 for offset in offsets).ljust(4, b"\0"), "little", signed=True)


def form_of(tile: Tile, decoder: Decoder, n: int, tails: bool) -> Form:
    """Return the kernel's compile-time parameters. They depend on n only by whether rows of y have whole
    groups of four.
    """
    return Form(tile, decoder, not decoder.scales_sums(tile), n % 4 == 0, tails)
