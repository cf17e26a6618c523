"""INT4 packing, its torch reference, and what the Hopper kernels are launched with."""

import numpy as np
import pytest
import torch
from scalegate.kernels.hopper import epilogue, gemm, invariant, invariant_config, stream_k, stream_k_config
from scalegate.kernels.hopper.packed_operand import SEMAPHORES, PackedOperand
from scalegate.kernels.hopper.tile import NUM_SMS
from scalegate.kernels.int4 import packing
from scalegate.kernels.int4.decoder import Int4Decoder
from scalegate.layouts.formats.int4 import Int4, Int4Weight, pack_nibbles
from scalegate.layouts.packing.swap_ab import PACKING, SWAP_AB

INT4 = Int4Decoder(half=False, group_size=128, fractional=False)
# n, k, group size, fractional zeros: whole tiles, ragged N, ragged K, groups over a tile
SHAPES = [
    (64, 128, 128, False),
    (130, 320, 64, True),
    (200, 416, 32, False),
    (72, 256, 256, False),
    (64, 96, 32, True),
]


def random_weight(n: int, k: int, group_size: int, fractional: bool) -> Int4Weight:
    generator = torch.Generator().manual_seed(n + k)
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, generator=generator)
    scale = torch.rand((n, k // group_size), generator=generator) * 0.02 + 0.001
    zero = torch.rand((n, k // group_size), generator=generator) * 15
    spec = Int4(group_size, zero_point="fractional" if fractional else "integer")
    return Int4Weight(spec, pack_nibbles(codes), scale, zero if fractional else zero.to(torch.uint8))


@pytest.mark.parametrize(("n", "k"), [(64, 64), (128, 192), (65, 80)])
def test_packing_is_undone_by_unpacking(n, k):
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8)
    assert torch.equal(packing.unpack_words(packing.pack_words(codes))[:n, :k], codes)


def test_a_word_holds_the_pairs_that_the_matrix_unit_wants_in_one_register():
    codes = torch.arange(64 * 64).view(64, 64).remainder(15).to(torch.uint8)
    words = packing.pack_words(codes).view(4, 8, 4, 2, 2)  # w, r, t, v, u
    warp, row, pair, right, below, slice_ = 2, 5, 3, 1, 1, 3
    word = int(words[warp, row, pair, right, below]) >> (4 * slice_)
    line = codes[16 * warp + 8 * below + row]
    column = 16 * slice_ + 8 * right + 2 * pair
    assert (word & 0xF, (word >> 16) & 0xF) == (int(line[column]), int(line[column + 1]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n", "k", "group_size", "fractional"), SHAPES)
def test_the_reference_is_the_weight_rounded_to_the_activations_type(n, k, group_size, fractional, dtype):
    weight = random_weight(n, k, group_size, fractional)
    packed = SWAP_AB.pack(weight, dtype)
    got = packing.reference_weight(
        packed.tensors["words"],
        packed.tensors["scale_words"],
        packed.attributes["group_size"],
        fractional,
        dtype,
    )[:n, :k]
    exact = weight.dequantize(torch.float32)
    error = (got.float() - exact).norm() / exact.norm()
    assert error < (3e-3 if dtype is torch.bfloat16 else 4e-4)


def test_padding_adds_nothing():
    weight = random_weight(65, 96, 32, False)
    tensors = SWAP_AB.pack(weight, torch.bfloat16).tensors
    assert torch.all(tensors["scale_words"][:, 65:] == 0)
    whole = packing.reference_weight(tensors["words"], tensors["scale_words"], 32, False, torch.bfloat16)
    assert torch.all(whole[65:] == 0)


def test_a_split_covers_every_tile_once_and_never_overfills_the_last_wave():
    for tiles in (1, 31, 64, 96, 131, 132, 133, 384, 1000):
        for units in (1, 7, 16, 48):
            split = invariant_config.split_of(tiles, units, slots=132)
            assert 0 <= split.whole <= tiles
            assert 1 <= split.splits <= min(units, invariant_config.MAX_SPLITS)
            assert split.splits > 1 or split.whole == tiles
            assert tiles - split.whole < SEMAPHORES


def test_few_tiles_are_split_and_a_full_wave_is_not():
    assert invariant_config.split_of(64, 16, slots=396).splits > 1
    assert invariant_config.split_of(396, 16, slots=396).splits == 1


SHAPES_SERVED = [
    (6144, 4096),
    (4096, 4096),
    (24576, 4096),
    (4096, 12288),
    (2560, 9728),
    (57344, 8192),
    (8, 64),
]


def test_the_split_depends_on_the_bucket_of_m_alone_within_it():
    for low, high in ((1, 8), (9, 16), (17, 32), (33, 64), (65, 128), (129, 256)):
        for n, k in SHAPES_SERVED:
            assert stream_k_config.config_for(low, n, k) == stream_k_config.config_for(high, n, k)
    assert stream_k_config.config_for(8, 4096, 4096) != stream_k_config.config_for(9, 4096, 4096)


def test_no_cta_is_idle_and_split_tiles_have_semaphores():
    for m in (1, 9, 16, 32, 64, 100, 128, 200, 256, 300, 512, 640, 1000, 4096):
        for n, k in SHAPES_SERVED:
            chosen = stream_k_config.config_for(m, n, k)
            tiles = -(-m // chosen.tile.m) * -(-n // chosen.tile.n)
            assert chosen.tile in stream_k_config.TILES
            assert 1 <= chosen.num_ctas <= tiles * -(-k // chosen.tile.iter_columns)
            slots = NUM_SMS * chosen.tile.ctas_per_sm
            assert chosen.num_ctas == tiles or chosen.num_ctas <= min(slots, SEMAPHORES)


@pytest.mark.parametrize(
    ("tiles", "slots", "places", "count"),
    [
        (80, 132, 4, 120),  # three for two tiles
        (192, 132, 4, 128),  # two for three
        (96, 132, 4, 128),  # four for three
        (160, 132, 4, 128),  # four for five: more of the chip than three for four
        (80, 132, 2, 132),  # 80 at two places: too little of the chip
        (304, 132, 4, 132),  # none
        (96, 264, 8, 256),  # eight for three
    ],
)
def test_ctas_keep_in_step_where_that_keeps_the_chip_busy(tiles, slots, places, count):
    assert stream_k_config.l2_aligned_ctas(tiles, slots, places) == count


@pytest.mark.parametrize(
    ("m", "n", "k", "tile", "num_ctas", "start_offsets"),
    [
        (512, 6144, 4096, stream_k_config.TILE_256X64, 128, (0, 0)),
        (512, 24576, 4096, stream_k_config.TILE_256X128, 128, (0,)),
        (512, 4096, 12288, stream_k_config.TILE_256X64, 128, (0,)),
        (256, 6144, 2048, stream_k_config.TILE_256X64, 96, (0,)),  # whole tiles: too little K to split
        (256, 2560, 4096, stream_k_config.TILE_128X64, 120, (0, 2, 1)),
        (128, 24576, 4096, stream_k_config.TILE_128X128, 128, (0, 0)),
        (128, 4096, 4096, stream_k_config.TILE_128X64, 128, (0, 1)),
        (
            8,
            2560,
            4096,
            stream_k_config.BUCKETS[8].stream_k,
            320,
            (0,),
        ),  # 8 parts of 2 iterations, not 9 unlike ones
        (8, 4096, 4096, stream_k_config.BUCKETS[8].stream_k, 384, (0,)),
        (8, 8192, 8192, stream_k_config.BUCKETS[8].stream_k, 396, (0,)),
        (
            640,
            4096,
            4096,
            stream_k_config.TILE_128X128,
            128,
            (0, 0, -1, -1),
        ),  # five of 128 rows, not three of 256
        (1024, 4096, 4096, stream_k_config.TILE_256X128, 128, (0,)),
        (768, 2560, 4096, stream_k_config.TILE_256X64, 120, (0,)),
        (
            1024,
            19456,
            2560,
            stream_k_config.TILE_256X128,
            128,
            (0,),
        ),  # nearly five tiles each: not worth a search
    ],
)
def test_tiles_and_splits_are_those_that_were_fastest(m, n, k, tile, num_ctas, start_offsets):
    assert stream_k_config.config_for(m, n, k) == stream_k.Config(tile, num_ctas, start_offsets)


@pytest.mark.parametrize(
    ("m", "n", "k", "num_ctas", "head_iters"),
    [
        (512, 2560, 4096, 120, 23),  # of 32 units; two tails each
        (256, 6144, 2560, 128, 17),  # of 20; three tails
        (256, 6144, 4096, 128, 26),
        (512, 2560, 9728, 120, 53),  # of 76
        (256, 6656, 4096, 130, 28),  # four tails; not timed
    ],
)
def test_heads_are_as_long_as_was_fastest(m, n, k, num_ctas, head_iters):
    assert stream_k_config.config_for(m, n, k) == stream_k.Config(
        stream_k_config.TILE_256X64, num_ctas, head_iters=head_iters
    )


@pytest.mark.parametrize(
    ("tiles", "iters_per_tile"),
    [
        (64, 96),  # one tail each would come too late
        (72, 32),  # 36 CTAs with two: too little of the chip
        (97, 32),  # a prime
        (120, 400),  # ten
        (96, 16),  # as long whole
        (96, 1),
        (200, 32),
    ],
)
def test_tiles_have_no_tails_where_these_do_not_come_out_even_or_gain_nothing(tiles, iters_per_tile):
    assert stream_k_config.head_tail_config(tiles, iters_per_tile) is None


def starts_of(offsets: tuple[int, ...], tiles: int, iters_per_tile: int) -> list[int]:
    equal = [i * tiles * iters_per_tile // len(offsets) for i in range(len(offsets) + 1)]
    return [start + offset for start, offset in zip(equal, (*offsets, 0), strict=True)]


@pytest.mark.parametrize(("period", "tiles"), [(2, 1), (3, 1), (3, 2), (4, 3), (2, 3), (4, 5)])
@pytest.mark.parametrize("iters_per_tile", [4, 5, 20, 32, 76])
def test_start_offsets_stay_within_their_tiles_and_never_make_the_last_cta_later(
    period, tiles, iters_per_tile
):
    columns = stream_k_config.TILE_256X64.iter_columns
    offsets = stream_k_config.balanced_start_offsets(period, tiles, iters_per_tile, columns)
    level = starts_of((0,) * period, tiles, iters_per_tile)
    moved = starts_of(offsets, tiles, iters_per_tile)
    assert offsets[0] == 0 and all(-128 <= offset <= 127 for offset in offsets)
    for before, after in zip(level, moved, strict=True):
        assert before // iters_per_tile == after // iters_per_tile
        assert (before % iters_per_tile == 0) == (after % iters_per_tile == 0)
    assert moved == sorted(set(moved))
    times, level_times = (
        stream_k_config.finish_times(starts, iters_per_tile, columns) for starts in (moved, level)
    )
    assert max(times) <= max(level_times)


def quotients(a: np.ndarray, b: int) -> np.ndarray:
    """As `stream_k.fast_divide` divides."""
    guess = (a.astype(np.float32) * np.float32(1 / b)).astype(np.int64)
    rest = a - guess * b
    return guess + (rest >= b) - (rest < 0)


@pytest.mark.parametrize(("n", "k"), [*SHAPES_SERVED, (1024, 1152), (128256, 16384)])
def test_iterations_are_divided_right_up_to_the_most_rows(n, k):
    """By fp32 reciprocals; and partial sums go to and come from the CTAs that have the tile's iterations."""
    for m in (8, 65, 256, 512, 640, 3000, gemm.MAX_ROWS):
        chosen = stream_k_config.config_for(m, n, k)
        tile, count, period = chosen.tile, chosen.num_ctas, len(chosen.start_offsets)
        iters_per_tile = -(-k // tile.iter_columns)
        total = tile.num_tiles(m, n) * iters_per_tile
        index = np.arange(count + 1)
        equal = quotients(index * total, count)
        assert np.array_equal(equal, index * total // count) and count * total < 2**31
        begins = equal + np.array(chosen.start_offsets)[index - quotients(index, period) * period]
        assert begins[0] == 0 and begins[-1] == total and np.all(np.diff(begins) > 0)
        first = quotients(begins[:-1], iters_per_tile)
        assert np.array_equal(first, begins[:-1] // iters_per_tile)
        owners = quotients((first * iters_per_tile + 1) * count - 1, total)
        assert np.array_equal(owners, np.searchsorted(begins, first * iters_per_tile, "right") - 1)
        end = quotients(begins[1:] - 1, iters_per_tile) + 1
        lasts = quotients(end * iters_per_tile * count - 1, total)
        assert np.array_equal(lasts, np.searchsorted(begins, end * iters_per_tile - 1, "right") - 1)


def test_what_a_split_costs_is_counted_where_it_arises():
    """Two CTAs, three tiles: a whole one and the first half of the next; its second half and a whole one."""
    columns, half = 128, 15 * 128
    send, reduce = stream_k_config.SEND_COST, stream_k_config.REDUCE_COST
    store = stream_k_config.STORE_COST
    assert stream_k_config.finish_times([0, 15, 30], 10, columns) == [half + send, half + store + reduce]
    # One tile for two: who owns it waits for the other's sums.
    sent = 5 * columns + send
    assert stream_k_config.finish_times([0, 5, 10], 10, columns) == [sent, sent + reduce]


def test_the_invariant_split_knows_only_the_shape_of_the_weight():
    assert invariant_config.splits_of(4096, 12288) > 1
    assert invariant_config.splits_of(24576, 4096) == 1


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("m", [0, 1, 40, 700, gemm.MAX_ROWS + 300])
def test_every_row_of_y_is_computed_by_one_launch(m, batch_invariant, monkeypatch):
    """With as many semaphores as tiles or CTAs that are awaited."""
    launches = []

    def launch(x, weight, y, config):
        assert config.num_ctas <= len(weight.semaphores) and len(config.start_offsets) <= 4
        launches.append((x, y))

    def launch_invariant(x, weight, y, tile, num_splits, sequential):
        tiles = -(-len(x) // tile.m) * -(-y.shape[1] // tile.n)
        assert num_splits == 1 or sequential or tiles <= len(weight.semaphores)
        launches.append((x, y))

    monkeypatch.setattr(stream_k, "launch", launch)
    monkeypatch.setattr(invariant, "launch", launch_invariant)
    n, k = 4096, 12288
    semaphores = torch.zeros(SEMAPHORES, dtype=torch.int32)
    x = torch.empty(m, 1).expand(m, k)
    y = gemm.matmul(x, PackedOperand(x, x, semaphores, INT4), n, batch_invariant)
    assert y.shape == (m, n)
    rows = [(part.storage_offset() // n, len(part)) for _, part in launches]
    assert all(len(part_x) == len(part_y) for part_x, part_y in launches)
    assert [row for first, count in rows for row in range(first, first + count)] == list(range(m))


class Recorder:
    """In place of a kernel: what it is launched with, by the names of its parameters."""

    def __init__(self, kernel):
        self.names = kernel.arg_names
        self.launches: list[tuple[tuple[int, ...], dict[str, object], dict[str, object]]] = []

    def __getitem__(self, grid):
        def launch(*arguments, num_warps, maxnreg, launch_pdl, **constants):
            assert self.names == [*self.names[: len(arguments)], *constants]
            options = {"num_warps": num_warps, "maxnreg": maxnreg, "launch_pdl": launch_pdl}
            self.launches.append((grid, dict(zip(self.names, arguments, strict=False)) | constants, options))

        return launch


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize(("n", "k", "group_size"), [(2560, 4096, 128), (1001, 416, 32)])
def test_a_kernel_is_given_what_it_names(n, k, group_size, batch_invariant, monkeypatch):
    pytest.importorskip("triton")
    packed = SWAP_AB.pack(random_weight(n, k, group_size, False), torch.bfloat16)
    module = invariant if batch_invariant else stream_k
    name = "invariant_kernel" if batch_invariant else "stream_k_kernel"
    recorder = Recorder(getattr(module, name))
    monkeypatch.setattr(module, name, recorder)
    monkeypatch.setattr(stream_k, "COMPILED", {})
    for m in (1, 40, 128, 512):
        x = torch.randn(m, k).bfloat16()
        gemm.matmul(x, PACKING.operand(packed), n, batch_invariant)
        grid, given, options = recorder.launches.pop()
        assert not recorder.launches
        form = given.get("FORM")
        tile, decoder = (form.tile, form.decoder) if form else (given["TILE"], given["DECODER"])
        assert (given["M"], given["N"], decoder.group_size) == (m, n, group_size)
        rows, columns = tile.m, 64 * tile.k_tiles
        assert tuple(given["x_desc"].shape) == (m, k) and given["x_desc"].block_shape == [rows, columns]
        assert given["words_desc"].block_shape == [tile.n // 64, tile.k_tiles * 8, 64]
        assert given["scale_desc"].block_shape == [max(1, columns // group_size), tile.n]
        assert given["y"].shape == (m, n) and given["semaphores"] is packed.tensors["semaphores"]
        assert options["num_warps"] == tile.n // 16 and options["launch_pdl"]
        tiles = -(-m // rows) * -(-n // tile.n)
        if batch_invariant:
            whole = given["whole_tiles"]
            assert grid == (whole + (tiles - whole) * given["num_splits"],)
            assert given["partials"].numel() >= (tiles - whole) * given["num_splits"] * rows * tile.n
        else:
            assert grid == (given["num_ctas"], 1, 1)
            assert given["total_iters"] == tiles * given["iters_per_tile"]
            assert form.tails == (given["head_iters"] > 0) == (m == 512 and n == 2560)
            assert not form.tails or grid[0] == tiles + tiles // given["tails_per_cta"]
            offsets = stream_k_config.config_for(m, n, k).start_offsets
            packed_offsets = given["start_offsets"].to_bytes(4, "little", signed=True)
            assert [*packed_offsets[: given["period"]]] == [offset & 255 for offset in offsets]
            floats = epilogue.partial_floats(tile.n, rows)
            assert grid[0] == tiles or given["partials"].numel() >= grid[0] * floats
