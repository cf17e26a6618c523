"""INT4 packing, its torch reference and the portable Triton kernels, the last under Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from scalegate.kernels.int4 import hopper, invariant, invariant_plan, shares, sums, swap_ab
from scalegate.kernels.int4.tile import ARRIVALS, MULTIPROCESSORS
from scalegate.layouts.int4 import Int4Weight, pack_nibbles
from scalegate.layouts.swap_ab import pack

INTERPRETED = Path(__file__).with_name("interpreted_int4.py")
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
    return Int4Weight(pack_nibbles(codes), scale, zero if fractional else zero.to(torch.uint8), group_size)


@pytest.mark.parametrize(("n", "k"), [(64, 64), (128, 192), (65, 80)])
def test_packing_is_undone_by_unpacking(n, k):
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8)
    assert torch.equal(swap_ab.unpack_words(swap_ab.pack_words(codes))[:n, :k], codes)


def test_a_word_holds_the_pairs_that_the_matrix_unit_wants_in_one_register():
    codes = torch.arange(64 * 64).view(64, 64).remainder(15).to(torch.uint8)
    words = swap_ab.pack_words(codes).view(4, 8, 4, 2, 2)  # w, r, t, v, u
    warp, row, pair, right, below, slice_ = 2, 5, 3, 1, 1, 3
    word = int(words[warp, row, pair, right, below]) >> (4 * slice_)
    line = codes[16 * warp + 8 * below + row]
    column = 16 * slice_ + 8 * right + 2 * pair
    assert (word & 0xF, (word >> 16) & 0xF) == (int(line[column]), int(line[column + 1]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n", "k", "group_size", "fractional"), SHAPES)
def test_the_reference_is_the_weight_rounded_to_the_activations_type(n, k, group_size, fractional, dtype):
    weight = random_weight(n, k, group_size, fractional)
    packed = pack("swap_ab", weight, dtype)
    got = swap_ab.reference_weight(
        packed.tensors["words"], packed.tensors["meta"], packed.meta["group_size"], fractional, dtype
    )[:n, :k]
    exact = weight.dequantize(torch.float32)
    error = (got.float() - exact).norm() / exact.norm()
    assert error < (3e-3 if dtype is torch.bfloat16 else 4e-4)


def test_padding_adds_nothing():
    weight = random_weight(65, 96, 32, False)
    tensors = pack("swap_ab", weight, torch.bfloat16).tensors
    assert torch.all(tensors["meta"][:, 65:] == 0)
    whole = swap_ab.reference_weight(tensors["words"], tensors["meta"], 32, False, torch.bfloat16)
    assert torch.all(whole[65:] == 0)


def test_the_portable_kernel_agrees_with_the_reference_under_the_interpreter():
    """The interpreter must be chosen before the kernel is imported, hence a process of its own."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-P", str(INTERPRETED)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "compared 5 shapes" in done.stdout


def test_a_split_covers_every_tile_once_and_never_overfills_the_last_wave():
    for tiles in (1, 31, 64, 96, 131, 132, 133, 384, 1000):
        for units in (1, 7, 16, 48):
            split = invariant_plan.split_of(tiles, units, slots=132)
            assert 0 <= split.whole <= tiles
            assert 1 <= split.parts <= min(units, invariant_plan.MAX_PARTS)
            assert split.parts > 1 or split.whole == tiles
            assert tiles - split.whole < ARRIVALS


def test_few_tiles_are_split_and_a_full_wave_is_not():
    assert invariant_plan.split_of(64, 16, slots=396).parts > 1
    assert invariant_plan.split_of(396, 16, slots=396).parts == 1


SHAPES_SERVED = [
    (6144, 4096),
    (4096, 4096),
    (24576, 4096),
    (4096, 12288),
    (2560, 9728),
    (57344, 8192),
    (8, 64),
]


def test_the_cut_depends_on_the_bucket_of_m_alone_within_it():
    for low, high in ((1, 8), (9, 16), (17, 32), (33, 64), (65, 128), (129, 256)):
        for n, k in SHAPES_SERVED:
            assert hopper.plan(low, n, k) == hopper.plan(high, n, k)
    assert hopper.plan(8, 4096, 4096) != hopper.plan(9, 4096, 4096)


def test_shares_are_none_empty_and_either_whole_tiles_or_counted():
    for m in (1, 9, 16, 32, 64, 100, 128, 200, 256, 300, 512, 640, 1000, 4096):
        for n, k in SHAPES_SERVED:
            chosen = hopper.plan(m, n, k)
            tiles = -(-m // chosen.tile.m) * -(-n // chosen.tile.n)
            assert chosen.tile in hopper.TILES
            assert 1 <= chosen.count <= tiles * -(-k // chosen.tile.unit)
            slots = MULTIPROCESSORS * chosen.tile.resident
            assert chosen.count == tiles or chosen.count <= min(slots, ARRIVALS)


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
    assert hopper.in_step(tiles, slots, places) == count


@pytest.mark.parametrize(
    ("m", "n", "k", "tile", "count", "cuts"),
    [
        (512, 6144, 4096, hopper.FLAT, 128, (0, 0)),
        (512, 24576, 4096, hopper.TALL, 128, (0,)),
        (512, 4096, 12288, hopper.FLAT, 128, (0,)),
        (256, 6144, 2048, hopper.FLAT, 96, (0,)),  # whole tiles: too little K to cut
        (256, 2560, 4096, hopper.ALONE, 120, (0, 2, 1)),
        (128, 24576, 4096, hopper.WIDE, 128, (0, 0)),
        (128, 4096, 4096, hopper.ALONE, 128, (0, 1)),
        (8, 2560, 4096, hopper.BUCKETS[8].shared, 320, (0,)),  # 8 parts of 2 units, not 9 unlike ones
        (8, 4096, 4096, hopper.BUCKETS[8].shared, 384, (0,)),
        (8, 8192, 8192, hopper.BUCKETS[8].shared, 396, (0,)),
        (640, 4096, 4096, hopper.WIDE, 128, (0, 0, -1, -1)),  # five of 128 rows, not three of 256
        (1024, 4096, 4096, hopper.TALL, 128, (0,)),
        (768, 2560, 4096, hopper.FLAT, 120, (0,)),
        (1024, 19456, 2560, hopper.TALL, 128, (0,)),  # nearly five tiles each: not worth a search
    ],
)
def test_tiles_and_cuts_are_those_that_were_fastest(m, n, k, tile, count, cuts):
    assert hopper.plan(m, n, k) == hopper.Shares(tile, count, cuts)


@pytest.mark.parametrize(
    ("m", "n", "k", "count", "head"),
    [
        (512, 2560, 4096, 120, 23),  # of 32 units; two tails each
        (256, 6144, 2560, 128, 17),  # of 20; three tails
        (256, 6144, 4096, 128, 26),
        (512, 2560, 9728, 120, 53),  # of 76
        (256, 6656, 4096, 130, 28),  # four tails; not timed
    ],
)
def test_heads_are_as_long_as_was_fastest(m, n, k, count, head):
    assert hopper.plan(m, n, k) == hopper.Shares(hopper.FLAT, count, head=head)


@pytest.mark.parametrize(
    ("tiles", "units_k"),
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
def test_tiles_have_no_tails_where_these_do_not_come_out_even_or_gain_nothing(tiles, units_k):
    assert hopper.heads_and_tails(tiles, units_k) is None


def begins_of(cuts: tuple[int, ...], tiles: int, units_k: int) -> list[int]:
    equal = [i * tiles * units_k // len(cuts) for i in range(len(cuts) + 1)]
    return [begin + cut for begin, cut in zip(equal, (*cuts, 0), strict=True)]


@pytest.mark.parametrize(("turn", "tiles"), [(2, 1), (3, 1), (3, 2), (4, 3), (2, 3), (4, 5)])
@pytest.mark.parametrize("units_k", [4, 5, 20, 32, 76])
def test_cuts_stay_within_their_tiles_and_never_make_the_last_end_later(turn, tiles, units_k):
    unit = hopper.FLAT.unit
    cuts = hopper.balanced(turn, tiles, units_k, unit)
    level, moved = begins_of((0,) * turn, tiles, units_k), begins_of(cuts, tiles, units_k)
    assert cuts[0] == 0 and all(-128 <= cut <= 127 for cut in cuts)
    for before, after in zip(level, moved, strict=True):
        assert before // units_k == after // units_k and (before % units_k == 0) == (after % units_k == 0)
    assert moved == sorted(set(moved))
    ends, level_ends = (hopper.ends_of(begins, units_k, unit) for begins in (moved, level))
    assert max(ends) <= max(level_ends)


def quotients(a: np.ndarray, b: int) -> np.ndarray:
    """As `shares.quotient` divides."""
    guess = (a.astype(np.float32) * np.float32(1 / b)).astype(np.int64)
    rest = a - guess * b
    return guess + (rest >= b) - (rest < 0)


@pytest.mark.parametrize(("n", "k"), [*SHAPES_SERVED, (1024, 1152), (128256, 16384)])
def test_shares_are_divided_right_up_to_the_most_rows(n, k):
    """By fp32 reciprocals; and the CTAs that sums are sent to and awaited from are those with the units."""
    for m in (8, 65, 256, 512, 640, 3000, hopper.MOST_ROWS):
        chosen = hopper.plan(m, n, k)
        tile, count, turn = chosen.tile, chosen.count, len(chosen.cuts)
        units_k = -(-k // tile.unit)
        total = tile.number(m, n) * units_k
        index = np.arange(count + 1)
        equal = quotients(index * total, count)
        assert np.array_equal(equal, index * total // count) and count * total < 2**31
        begins = equal + np.array(chosen.cuts)[index - quotients(index, turn) * turn]
        assert begins[0] == 0 and begins[-1] == total and np.all(np.diff(begins) > 0)
        first = quotients(begins[:-1], units_k)
        assert np.array_equal(first, begins[:-1] // units_k)
        owners = quotients((first * units_k + 1) * count - 1, total)
        assert np.array_equal(owners, np.searchsorted(begins, first * units_k, "right") - 1)
        end = quotients(begins[1:] - 1, units_k) + 1
        lasts = quotients(end * units_k * count - 1, total)
        assert np.array_equal(lasts, np.searchsorted(begins, end * units_k - 1, "right") - 1)


def test_what_a_cut_costs_is_counted_where_it_arises():
    """Two CTAs, three tiles: a whole one and the first half of the next; its second half and a whole one."""
    unit, half = 128, 15 * 128
    send, add, write = hopper.SEND, hopper.ADD, hopper.WRITE
    assert hopper.ends_of([0, 15, 30], 10, unit) == [half + send, half + write + add]
    # One tile for two: who owns it waits for the other's sums.
    assert hopper.ends_of([0, 5, 10], 10, unit) == [5 * unit + send, 5 * unit + send + add]


def test_the_invariant_split_knows_only_the_shape_of_the_weight():
    assert invariant_plan.parts_of(4096, 12288) > 1
    assert invariant_plan.parts_of(24576, 4096) == 1


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("m", [0, 1, 40, 700, hopper.MOST_ROWS + 300])
def test_every_row_of_y_is_computed_by_one_launch(m, batch_invariant, monkeypatch):
    """With as many counters as parts that are awaited."""
    launches = []

    def launch(x, words, meta, arrivals, y, group_size, fractional, tile, count, cuts, head):
        assert count <= len(arrivals) and len(cuts) <= 4
        launches.append((x, y))

    def launch_invariant(x, words, meta, arrivals, y, group_size, fractional, tile, parts, ordered):
        tiles = -(-len(x) // tile.m) * -(-y.shape[1] // tile.n)
        assert parts == 1 or ordered or tiles <= len(arrivals)
        launches.append((x, y))

    monkeypatch.setattr(shares, "launch", launch)
    monkeypatch.setattr(invariant, "launch", launch_invariant)
    n, k = 4096, 12288
    arrivals = torch.zeros(ARRIVALS, dtype=torch.int32)
    x = torch.empty(m, 1).expand(m, k)
    y = hopper.matmul(x, x, x, arrivals, n, 128, False, batch_invariant)
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
    packed = pack("swap_ab", random_weight(n, k, group_size, False), torch.bfloat16).tensors
    arrivals = torch.zeros(ARRIVALS, dtype=torch.int32)
    module = invariant if batch_invariant else shares
    name = "int4_invariant_kernel" if batch_invariant else "int4_shares_kernel"
    recorder = Recorder(getattr(module, name))
    monkeypatch.setattr(module, name, recorder)
    for m in (1, 40, 128, 512):
        x = torch.randn(m, k).bfloat16()
        hopper.matmul(x, packed["words"], packed["meta"], arrivals, n, group_size, False, batch_invariant)
        grid, given, options = recorder.launches.pop()
        assert not recorder.launches
        assert (given["M"], given["N"], given["GROUP"]) == (m, n, group_size)
        rows, columns = given["BM"], 64 * given["TILES"]
        assert tuple(given["x_desc"].shape) == (m, k) and given["x_desc"].block_shape == [rows, columns]
        assert given["words_desc"].block_shape == [given["BN"] // 64, given["TILES"] * 8, 64]
        assert given["meta_desc"].block_shape == [max(1, columns // group_size), given["BN"]]
        assert given["y"].shape == (m, n) and given["arrivals"] is arrivals
        assert options["num_warps"] == given["BN"] // 16 and options["launch_pdl"]
        tiles = -(-m // rows) * -(-n // given["BN"])
        if batch_invariant:
            whole = given["whole_tiles"]
            assert grid == (whole + (tiles - whole) * given["split"],)
            assert given["partials"].numel() >= (tiles - whole) * given["split"] * rows * given["BN"]
        else:
            assert grid == (given["count"],) and given["total"] == tiles * given["units_k"]
            assert given["TAILS"] == (given["head"] > 0) == (m == 512 and n == 2560)
            assert not given["TAILS"] or grid[0] == tiles + tiles // given["each"]
            cuts = hopper.plan(m, n, k).cuts
            assert [(given["cuts"] << 24 - 8 * i & 0xFFFFFFFF) >> 24 for i in range(given["turn"])] == [
                cut & 255 for cut in cuts
            ]
            numbers = sums.numbers_of(given["BN"], rows)
            assert grid[0] == tiles or given["partials"].numel() >= grid[0] * numbers
