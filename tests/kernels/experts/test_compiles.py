"""What the compiler makes of the experts' kernels, with no GPU: instructions a weight, no spills."""

import functools
import re
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("triton")

import triton
from scalegate.kernels.experts import gated, int4, nvfp4, one_token, packed, routing, unquantized
from scalegate.kernels.experts.tile import BLOCK_ROWS, Tile
from scalegate.tests.exhaustive import exhaustive_but
from scalegate.tests.kernels.experts.tunings import CANDIDATES
from scalegate.tests.kernels.hopper_compiler import TOOLS, assembler_notes
from scalegate.tests.kernels.triton_versions import bound
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

pytestmark = pytest.mark.long

BUCKETS = range(len(BLOCK_ROWS))
FEW_BUCKETS = pytest.mark.parametrize("bucket", exhaustive_but(BUCKETS, 0, 3))
"""One for each matrix instruction."""
CONVERSION = re.compile(r"\b(I2F|I2FP|F2F|F2FP)\b")
WGMMA_FROM = bound(16, 16, 8, 8)
"""Rows of a block; for fewer Triton takes mma.sync."""
SPILLING = 5
"""The bucket whose INT4 tile may spill: on an H200 four warps that do beat eight that do not by 17%."""
MOST_INSTRUCTIONS = {8: bound(3.3, 3.3, 3.3, 3.6), 16: bound(3.1, 3.1, 3.1, 3.2), 32: 3.4, 64: 3.6, 128: 4.9}
"""Of the INT4 loop a weight, by rows of a block, groups of 128. 3.9 spends more on addresses."""
NVFP4_MOST_INSTRUCTIONS = {
    8: bound(3.1, 3.1, 3.3, 3.7), 16: bound(3.1, 3.1, 3.1, 3.2), 32: 3.3, 64: 3.6, 128: 4.3,
}  # fmt: skip
DIVISIBLE = ("N", "K", "x_stride", "rows", "expert_stride", "n_stride", "inner")
REGISTERS = 65536
"""Of an SM."""


def compiled(
    kernel, types: dict[str, str], constants: dict[str, object], tile: Tile, capability: int, form=None
):
    """form: of the kernel's settings, a constant each, makes the one argument that some kernels take."""
    constants = constants | {"PDL": capability >= 90}
    if form:
        constants |= {"FORM": form(**{name: constants[name.upper()] for name in form._fields})}
        constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    signature = dict.fromkeys(kernel.arg_names, "i32") | types | dict.fromkeys(constants, "constexpr")
    places = {name: (kernel.arg_names.index(name),) for name in signature}
    aligned = [
        n for n, kind in signature.items() if kind.startswith("*") or (n in DIVISIBLE and kind == "i32")
    ]
    source = ASTSource(
        kernel,
        signature,
        {places[name]: value for name, value in constants.items()},
        {places[name]: [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"num_warps": tile.warps, "num_stages": tile.stages_on(divmod(capability, 10))}
    options |= {"launch_pdl": capability >= 90}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


@functools.cache
def int4_kernel(
    bucket: int, group=128, fractional=False, half=False, ragged=False, biased=False, capability=90
):
    tile, block_rows = packed.TILES[bucket], BLOCK_ROWS[bucket]
    element = "*fp16" if half else "*bf16"
    types = dict.fromkeys(("x", "y", "bias"), element)
    types |= dict.fromkeys(("words", "scale_words", "assignments", "block_expert"), "*i32")
    decoder = int4.Int4Experts(half, group, fractional)
    constants = {"SHARED_BY": 8, "EVEN_K": not ragged, "DECODER": decoder, "ASM": True, "factor": None}
    constants |= {"CHAINS": 2 if block_rows <= packed.TWO_CHAINS_TO else 1}
    constants |= {"EVICT": "evict_first", "BM": block_rows, "BN": tile.n} | ({} if biased else {"bias": None})
    return compiled(packed.packed_grouped_kernel, types, constants, tile, capability, packed.Form)


@functools.cache
def nvfp4_kernel(bucket: int, ragged=False, biased=False, capability=90):
    tile, block_rows = packed.TILES[bucket], BLOCK_ROWS[bucket]
    types = dict.fromkeys(("x", "y", "bias"), "*bf16") | {"factor": "*fp32"}
    types |= dict.fromkeys(("words", "scale_words", "assignments", "block_expert"), "*i32")
    constants = {"SHARED_BY": 8, "EVEN_K": not ragged, "DECODER": nvfp4.NVFP4Experts(False), "ASM": True}
    constants |= {"CHAINS": 2 if block_rows <= packed.TWO_CHAINS_TO else 1}
    constants |= {"EVICT": "evict_first", "BM": block_rows, "BN": tile.n} | ({} if biased else {"bias": None})
    return compiled(packed.packed_grouped_kernel, types, constants, tile, capability, packed.Form)


@functools.cache
def unquantized_kernel(bucket: int, transposed=False, ragged=False, biased=False, capability=90):
    tile, block_rows = unquantized.TILES[bucket], BLOCK_ROWS[bucket]
    types = dict.fromkeys(("x", "y", "bias", "weight"), "*bf16")
    types |= dict.fromkeys(("assignments", "block_expert"), "*i32")
    constants = {"SHARED_BY": 8, "EVEN_N": not ragged, "EVEN_K": not ragged, "EVICT": "evict_first"}
    constants |= {"PRECISION": "tf32"}
    constants |= {"n_stride" if transposed else "k_stride": 1} | ({} if biased else {"bias": None})
    constants |= {"BM": block_rows, "BN": tile.n, "BK": tile.k}
    return compiled(unquantized.grouped_kernel, types, constants, tile, capability, unquantized.Form)


def disassembled(kernel, tmp_path: Path) -> list[tuple[int, str]]:
    """Addresses and instructions."""
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    text = subprocess.run([TOOLS / "cuobjdump", "-sass", cubin], capture_output=True, text=True, check=True)
    return [(int(at, 16), line) for at, line in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", text.stdout)]


def loop_of(instructions: list[tuple[int, str]]) -> list[str]:
    """The body of the one loop that multiplies."""
    loops = []
    for at, line in instructions:
        to = re.search(r"\bBRA 0x([0-9a-f]+)", line)
        if to and int(to[1], 16) < at:
            body = [text for place, text in instructions if int(to[1], 16) <= place <= at]
            loops += [body] if any("MMA" in text for text in body) else []
    assert len(loops) == 1
    return loops[0]


def check_no_local_memory(kernel, instructions: list[tuple[int, str]]) -> None:
    assert not [line for _, line in instructions if re.search(r"\b(LDL|STL)\b", line)]
    assert kernel.metadata.shared <= 227 * 1024


@FEW_BUCKETS
def test_unquantized_tiles_use_the_matrix_unit_and_spill_nothing(bucket, tmp_path):
    kernel = unquantized_kernel(bucket)
    instructions = disassembled(kernel, tmp_path)
    check_no_local_memory(kernel, instructions)
    product = "HGMMA" if BLOCK_ROWS[bucket] >= WGMMA_FROM else "HMMA"
    assert any(product in line for line in loop_of(instructions))
    assert "serialized" not in assembler_notes(kernel, tmp_path)


@pytest.mark.parametrize(
    ("bucket", "transposed"),
    exhaustive_but([(1, True), (3, False), (5, False), (5, True)], (3, False)),
)
def test_ragged_biased_and_transposed_weights_spill_nothing(bucket, transposed, tmp_path):
    kernel = unquantized_kernel(bucket, transposed, ragged=True, biased=True)
    check_no_local_memory(kernel, disassembled(kernel, tmp_path))


@FEW_BUCKETS
def test_int4_tiles_convert_and_spill_nothing_within_their_instructions_a_weight(bucket, tmp_path):
    kernel, tile, block_rows = int4_kernel(bucket), packed.TILES[bucket], BLOCK_ROWS[bucket]
    instructions = disassembled(kernel, tmp_path)
    if bucket != SPILLING:
        check_no_local_memory(kernel, instructions)
    loop = loop_of(instructions)
    product = "HGMMA" if block_rows >= WGMMA_FROM else "HMMA"
    assert any(product in line for line in loop)
    assert "serialized" not in assembler_notes(kernel, tmp_path)
    assert not [line for line in loop if CONVERSION.search(line)]
    chains = 2 if block_rows <= packed.TWO_CHAINS_TO else 1
    weights_a_thread = chains * tile.n * packed.TILE_K / (32 * tile.warps)
    assert len(loop) <= MOST_INSTRUCTIONS[block_rows] * weights_a_thread


@FEW_BUCKETS
def test_nvfp4_tiles_convert_and_spill_nothing_within_their_instructions_a_weight(bucket, tmp_path):
    kernel, tile, block_rows = nvfp4_kernel(bucket), packed.TILES[bucket], BLOCK_ROWS[bucket]
    instructions = disassembled(kernel, tmp_path)
    if bucket != SPILLING:
        check_no_local_memory(kernel, instructions)
    loop = loop_of(instructions)
    assert "serialized" not in assembler_notes(kernel, tmp_path)
    assert not [line for line in loop if CONVERSION.search(line)]
    chains = 2 if block_rows <= packed.TWO_CHAINS_TO else 1
    weights_a_thread = chains * tile.n * packed.TILE_K / (32 * tile.warps)
    assert len(loop) <= NVFP4_MOST_INSTRUCTIONS[block_rows] * weights_a_thread


@pytest.mark.parametrize(
    ("bucket", "group", "fractional", "half"),
    exhaustive_but(
        [
            (1, 32, True, False),
            (2, 32, False, True),
            (3, 64, False, True),
            (4, 128, True, True),
            (4, 32, True, True),
        ],
        (1, 32, True, False),
    ),
)
def test_every_form_of_the_int4_weight_spills_nothing(bucket, group, fractional, half, tmp_path):
    kernel = int4_kernel(bucket, group, fractional, half, ragged=True, biased=True)
    check_no_local_memory(kernel, disassembled(kernel, tmp_path))


@pytest.mark.parametrize(
    ("bucket", "capability"),
    exhaustive_but([(1, 90), (3, 90), (5, 90), (1, 80), (5, 80), (3, 100)], (3, 90), (1, 80)),
)
def test_words_reach_their_registers_by_pairs_of_columns_and_nothing_is_rearranged(bucket, capability):
    """The PTX takes neighbouring columns of one row together, as the compiler must deal them out."""
    ttgir = int4_kernel(bucket, capability=capability).asm["ttgir"]
    unpackings = [line for line in ttgir.splitlines() if "lop3.b32" in line]
    assert unpackings
    for line in unpackings:
        layout = re.search(r"tensor<\d+x16xi32, (#\w+)>", line)[1]
        definition = re.search(rf"^{layout} = (.*)$", ttgir, re.MULTILINE)[1]
        assert "register = [[0, 1], " in definition
    # Of the sums alone, for their way out; from 3.8 on of where they go, too.
    last = ttgir.split("lop3.b32")[-1].splitlines()
    assert 1 <= len([line for line in last if "convert_layout" in line]) <= bound(1, 1, 4, 4)


@pytest.mark.parametrize(
    ("bucket", "capability"),
    exhaustive_but([(1, 80), (3, 80), (5, 80), (5, 89), (1, 100), (5, 100)], (1, 80)),
)
def test_products_compile_for_other_chips(bucket, capability):
    shared = 99 * 1024 if capability == 89 else 163 * 1024 if capability == 80 else 227 * 1024
    for kernel in (
        int4_kernel(bucket, capability=capability),
        unquantized_kernel(bucket, capability=capability),
    ):
        assert kernel.asm["cubin"]
        assert kernel.metadata.shared <= shared


@pytest.mark.parametrize("bucket", exhaustive_but(BUCKETS, 3))
def test_routing_compiles_and_uses_no_global_atomics(bucket, tmp_path):
    chunk, warps = routing.chunk_of(bucket, 128)
    types = dict.fromkeys(("assignments_ptr", "block_expert_ptr"), "*i32") | {"expert_ptr": "*i64"}
    constants = {"ROWS": BLOCK_ROWS[bucket], "BINS": 128, "CHUNK": chunk}
    kernel = compiled(routing._route, types, constants, Tile(0, 0, 2, warps), 90)
    instructions = disassembled(kernel, tmp_path)
    check_no_local_memory(kernel, instructions)
    assert not [line for _, line in instructions if re.search(r"\b(ATOMG|RED|REDG)\b", line)]


EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 128, 8, 2048, 768
"""Qwen3-30B-A3B, whose shape the tunings of one token are for."""


def one_token_kernel(
    name: str, warps: int, types: dict[str, str], constants: dict, half=False, capability=90
):
    element = "*fp16" if half else "*bf16"
    kernel, form = {
        "gate_up": (one_token.gate_up_kernel, one_token.GateUpForm),
        "down": (one_token.down_kernel, one_token.DownForm),
    }[name]
    pointers = (
        "x",
        "activation",
        "y",
        "weight",
        "words",
        "scale_words",
        "next_words",
        "next_scales",
        "expert",
    )
    types = dict.fromkeys(pointers, element) | types | {"expert": "*i64"}
    types |= dict.fromkeys(("words", "scale_words", "next_words", "next_scales"), "*i32")
    types = {name: kind for name, kind in types.items() if name in kernel.arg_names}
    constants = {"HALF": half, "ASM": True} | constants
    return compiled(kernel, types, constants, Tile(0, 0, 1, warps), capability, form)


@functools.cache
def gate_up_of_one_token(
    splits=2, steps=8, rounds=1, even=True, fractional=False, half=False, prefetch=True, capability=90
):
    constants = {"PROGRAMS": INTERMEDIATE // 16, "SPLITS": splits, "STEPS": steps, "ROUNDS": rounds}
    constants |= {"EVEN": even, "FRACTIONAL": fractional, "PREFETCH": prefetch and capability >= 90}
    return one_token_kernel("gate_up", 2 * splits, {}, constants, half, capability)


@functools.cache
def down_of_one_token(
    splits=1, steps=6, rounds=1, even=True, fractional=False, half=False, taken=8, padded=8, capability=90
):
    constants = {"TAKEN": taken, "PADDED": padded, "SPLITS": splits, "STEPS": steps, "ROUNDS": rounds}
    constants |= {"EVEN": even, "FRACTIONAL": fractional}
    return one_token_kernel("down", padded * splits, {}, constants, half, capability)


def kernels_of(tuning: one_token.Tuning, **form):
    steps = [
        one_token.steps_and_rounds(k // packed.TILE_K, splits)
        for k, splits in ((HIDDEN, tuning.gate_up_splits), (INTERMEDIATE, tuning.down_splits))
    ]
    return (
        gate_up_of_one_token(tuning.gate_up_splits, *steps[0], prefetch=tuning.prefetch, **form),
        down_of_one_token(tuning.down_splits, *steps[1], **form),
    )


def places(instructions: list[tuple[int, str]], opcode: str) -> list[int]:
    return [at for at, (_, line) in enumerate(instructions) if re.search(rf"(^|\s){opcode}", line)]


@pytest.mark.parametrize("tuning", exhaustive_but(CANDIDATES, one_token.TUNING), ids=str)
def test_one_token_asks_for_all_words_before_it_multiplies_and_moves_none_of_them(tuning, tmp_path):
    for kernel, k, splits in zip(
        kernels_of(tuning),
        (HIDDEN, INTERMEDIATE),
        (tuning.gate_up_splits, tuning.down_splits),
        strict=True,
    ):
        instructions = disassembled(kernel, tmp_path)
        check_no_local_memory(kernel, instructions)
        assert not [line for _, line in instructions if CONVERSION.search(line) and "F2FP.BF16" not in line]
        steps = k // packed.TILE_K // splits
        words, products = places(instructions, r"LDG\.E\.EF\.128"), places(instructions, "HMMA")
        assert len(words) == 2 * steps
        assert max(words) < min(products)
        # Besides decoding: addresses, x by way of shared memory, scales, and the sums of warps, which from
        # 3.7 on travel in more steps.
        assert len(instructions) <= 72 * steps + bound(550, 624, 624, 624)
        assert len(places(instructions, r"BAR\.SYNC")) <= bound(5, 24, 24, 24)
        assert len(places(instructions, "STS")) <= bound(16, 34, 46, 46)


@pytest.mark.parametrize("half", exhaustive_but([False, True], False))
def test_no_word_is_unpacked_without_the_one_beside_it(half):
    """As the compiler does with a tensor that is one number: what would have been beside it is anything."""
    for kernel in (gate_up_of_one_token(half=half), down_of_one_token(half=half)):
        unpacked = re.findall(
            r"elementwise_inline_asm .*lop3.*packed_element = 2.* : (\S+)", kernel.asm["ttgir"]
        )
        assert unpacked and all(kind.startswith("tensor<") for kind in unpacked)


def test_down_reads_words_before_it_waits_and_gate_up_lets_it_begin_before_it_multiplies(tmp_path):
    gate_up, down = (disassembled(kernel, tmp_path) for kernel in kernels_of(one_token.TUNING))
    waits, begins = (
        [places(instructions, opcode) for instructions in (gate_up, down)]
        for opcode in ("ACQBULK", "PREEXIT")
    )
    assert [len(found) for found in (*waits, *begins)] == [1, 1, 1, 1]
    assert waits[0][0] < min(places(gate_up, "LDG")), "which experts, and x, come from the kernel before"
    words = r"LDG\.E\.EF\.128"
    assert max(places(gate_up, words)) < begins[0][0] < min(places(gate_up, "HMMA"))
    assert max(places(down, words)) < waits[1][0] < min(places(down, "HMMA"))
    # Until then `down` has read what is older than `gate_up` alone: experts, shares, words and scales.
    early = [line for at, line in enumerate(down) if "LDG" in line[1] and at < waits[1][0]]
    late = [line for at, line in enumerate(down) if "LDG" in line[1] and at > waits[1][0]]
    assert late and all("LDG.E.128" in line for _, line in late), "x alone"
    assert len(early) >= 12


def test_all_of_gate_up_fits_the_device_at_once_and_down_beside_it_as_it_ends(tmp_path):
    def registers(kernel, warps: int) -> int:
        cubin = tmp_path / "kernel.cubin"
        cubin.write_bytes(kernel.asm["cubin"])
        command = [TOOLS / "cuobjdump", "-res-usage", cubin]
        used = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return -(-int(re.search(r"REG:(\d+)", used)[1]) // 8) * 8 * 32 * warps

    tuning = one_token.TUNING
    gate_up, down = kernels_of(tuning)
    programs = TOP_K * INTERMEDIATE // one_token.ROWS
    per_sm = triton.cdiv(programs, 132)
    of_gate_up = registers(gate_up, 2 * tuning.gate_up_splits)
    assert per_sm * of_gate_up <= REGISTERS
    assert (per_sm - 1) * of_gate_up + registers(down, 8 * tuning.down_splits) <= REGISTERS


@pytest.mark.exhaustive
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("fractional", [False, True])
def test_every_form_of_one_tokens_weights_spills_nothing(half, fractional, tmp_path):
    for kernel in (
        *kernels_of(one_token.TUNING, fractional=fractional, half=half),
        gate_up_of_one_token(2, 8, 3, even=False, fractional=fractional, half=half),
        down_of_one_token(1, 5, 2, even=False, fractional=fractional, half=half, taken=6),
        down_of_one_token(1, 4, 1, fractional=fractional, half=half, taken=10, padded=16),
        down_of_one_token(8, 1, 1, fractional=fractional, half=half, taken=1, padded=1),
    ):
        check_no_local_memory(kernel, disassembled(kernel, tmp_path))


@pytest.mark.parametrize("capability", exhaustive_but([80, 100, 120], 80))
def test_one_tokens_kernels_compile_for_other_chips(capability):
    for kernel in (gate_up_of_one_token(capability=capability), down_of_one_token(capability=capability)):
        assert kernel.asm["cubin"]
        assert kernel.metadata.shared <= 99 * 1024


def test_what_lies_between_grouped_products_is_loaded_eight_numbers_at_a_time(tmp_path):
    pointers = {"gate_up": "*bf16", "y": "*bf16", "rows": "*bf16", "weight": "*bf16"}
    for kernel, constants, warps in (
        (gated.silu_and_multiply_kernel, {"BLOCK": gated.SILU_BLOCK}, 4),
        (gated.weighted_sum_kernel, {"BLOCK": gated.SUM_BLOCK, "TAKEN": 8}, 2),
    ):
        types = {name: kind for name, kind in pointers.items() if name in kernel.arg_names}
        built = compiled(kernel, types, constants, Tile(0, 0, 1, warps), 90)
        instructions = disassembled(built, tmp_path)
        check_no_local_memory(built, instructions)
        assert len(places(instructions, r"LDG\.E\.128")) == (8 if "TAKEN" in constants else 2)
        assert len(places(instructions, r"STG\.E\.128")) == 1
