"""Kernels over codes below eight bits, compiled for a GPU without one: no conversions of codes, few spills.

Interpreters take what compilers refuse, and say nothing of registers.
"""

import re
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("triton")

import triton
from scalegate.kernels.attention.kvarn import (
    decode as kvarn_decode,
)
from scalegate.kernels.attention.kvarn import (
    flush,
    flush_pages,
    held,
)
from scalegate.kernels.attention.kvarn import (
    prefill as kvarn_prefill,
)
from scalegate.kernels.attention.kvarn import (
    widen as kvarn_widen,
)
from scalegate.kernels.attention.per_token import (
    decode as token_decode,
)
from scalegate.kernels.attention.per_token import (
    prefill as token_prefill,
)
from scalegate.kernels.attention.per_token import (
    widen as token_widen,
)
from scalegate.tests.exhaustive import exhaustive_but
from scalegate.tests.kernels.hopper_compiler import assembler_notes, disassembled, spilled
from scalegate.tests.kernels.triton_versions import bound
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

pytestmark = pytest.mark.long

HOPPER = GPUTarget("cuda", 90, 32)
SPILLED_OUTSIDE_LOOPS = 32
"""Bytes: a few numbers that a program needs once."""
SPILLED_BY_SPLIT = 192
HALF = (
    "key_ptr",
    "value_ptr",
    "q_ptr",
    "held_ptr",
    "channels_ptr",
    "tokens_ptr",
    "keys_ptr",
    "values_ptr",
    "matrix_ptr",
    "turned_ptr",
)
FULL = ("partial_ptr", "lse_ptr", "head_scale_k_ptr", "head_scale_v_ptr")
LONG = ("rows_ptr", "layers_ptr", "pages_ptr", "positions_ptr", "slots_ptr", "token_rows_ptr")
INTEGERS = (
    "block_table_ptr",
    "lengths_ptr",
    "table_ptr",
    "tiles_ptr",
    "seq_lens_ptr",
    "starts_ptr",
    "spans_ptr",
    "written_ptr",
)
PAIRS = ("scales_k_ptr", "scales_v_ptr")
STRIDES = ("key_stride", "value_stride")
"""A model's own, divided by 16."""
NUMBERS = ("window", "table_stride", "max_splits", "num_requests", "count")
SHARED, REGISTERS = 227 * 1024, 65536
"""Bytes and registers of a multiprocessor."""
TYPES = {
    **dict.fromkeys(HALF, "*fp16"),
    **dict.fromkeys(FULL, "*fp32"),
    **dict.fromkeys(LONG, "*i64"),
    **dict.fromkeys((*INTEGERS, *PAIRS), "*i32"),
    **dict.fromkeys(("words_ptr", "words_k_ptr", "words_v_ptr"), "*i16"),
    **dict.fromkeys(("scale_log2", "softcap"), "fp32"),
    **dict.fromkeys((*NUMBERS, *STRIDES), "i32"),
    "out_ptr": "*bf16",
    "pages": ("*i16", "*i16", "*fp16", "*fp16"),
}
HEADS = {"HEADS": 32, "KV_HEADS": 8, "DIM": 128}
KVARN = {"VALUE_BITS": 2, "GROUP_SIZE": 128}
TOKENS = {"PAGE": 64, "BLOCK": 64, "WINDOW": False}
PLAIN = {"SOFTCAP": False, "ASM": True, "PLAIN_BLOCK": 32, "PIECE": 64, "PRECISION": "tf32"}
RAW = ("q_ptr", "query_ptr", "held_ptr", "key_ptr", "value_ptr", "keys_ptr", "values_ptr")
AS_IT_CAME = dict.fromkeys(RAW, "*bf16")
INT4 = {"NVFP4": False, "head_scale_k_ptr": None, "head_scale_v_ptr": None}
DECODE = {"GROUP": 8, "SPLIT": 256, "MERGED": True, "SINKS": False, "PDL": True}
PREFILL = {"GROUP": 4, "TOKENS": 16, "SINKS": False, "sinks_ptr": None}


def compiled(
    kernel, constants: dict[str, object], warps: int, stages: int, registers=None, form=None, **types: str
):
    """form: of the kernel's settings, a constant each, makes the one argument that some kernels take."""
    if form:
        constants |= {"FORM": form(**{name: constants[name.upper()] for name in form._fields})}
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    kinds = {**TYPES, **types}
    signature = {name: "constexpr" if name in constants else kinds[name] for name in kernel.arg_names}
    places = {name: (kernel.arg_names.index(name),) for name in kernel.arg_names}
    divided = [place for n, place in places.items() if signature[n][0] == "*" or n in STRIDES]
    for name, kind in signature.items():
        divided += [(*places[name], index) for index in range(len(kind)) if isinstance(kind, tuple)]
    aligned = {place: [["tt.divisibility", 16]] for place in divided}
    kind = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    source = kind(kernel, signature, {places[n]: value for n, value in constants.items()}, aligned)
    options = {"num_warps": warps, "num_stages": stages, "maxnreg": registers}
    return triton.compile(source, target=HOPPER, options=options)


def operations_of(kernel, tmp_path: Path) -> Counter[str]:
    lines = disassembled(kernel, tmp_path)
    return Counter(re.sub(r"^@!?U?P\w+ ", "", line).split()[0].split(".")[0] for line in lines)


def spills_in_shortest_loop(kernel, tmp_path: Path, products: int) -> int:
    """Loads and stores of spilled registers in the shortest loop that has so many products at least."""
    lines = disassembled(kernel, tmp_path)
    loops = []
    for end, line in enumerate(lines):
        branch = re.search(r"\bBRA (0x[0-9a-f]+)", line)
        inside = lines[int(branch[1], 16) // 16 : end + 1] if branch else []
        if sum("IMMA" in line for line in inside) >= products:
            loops.append(inside)
    return sum("LDL" in line or "STL" in line for line in min(loops, key=len))


@pytest.mark.parametrize(
    "name", exhaustive_but(["kvarn_k4v2", "kvarn_k4v4", "int4", "nvfp4"], "kvarn_k4v2", "int4")
)
def test_decoding_multiplies_codes_as_they_are(name: str, tmp_path: Path):
    if name == "nvfp4":
        block = token_decode.NVFP4_BLOCK
        constants = {**HEADS, **TOKENS, **PLAIN, **DECODE, "NVFP4": True, "BLOCK": block}
        types = {"q_ptr": "*bf16", **dict.fromkeys(PAIRS, "*i16")}
        kernel = compiled(
            token_decode._attend_splits, constants, 1, 2, token_decode.REGISTERS, token_decode.Form, **types
        )
    elif name == "int4":
        constants = {**HEADS, **TOKENS, **PLAIN, **DECODE, **INT4}
        registers, form = token_decode.REGISTERS, token_decode.Form
        kernel = compiled(token_decode._attend_splits, constants, 1, 2, registers, form)
    else:
        stages = kvarn_decode.STAGES
        constants = {**HEADS, **KVARN, **PLAIN, **DECODE, "VALUE_BITS": int(name[-1]), "STAGES": stages}
        constants["GROUP"] = 4
        registers = kvarn_decode.REGISTERS[int(name[-1])]
        form = kvarn_decode.Form
        kernel = compiled(kvarn_decode._attend_splits, constants, 1, stages, registers, form, **AS_IT_CAME)
    operations = operations_of(kernel, tmp_path)
    assert operations["HMMA"] >= 32 and operations["LDGSTS"] > 0
    # KVarN's sums become fp32, no codes do.
    sums = 64 if name.startswith("kvarn") else 0
    assert operations["I2F"] == 0 and operations["I2FP"] <= sums + 4, operations
    if name.startswith("kvarn"):
        assert 64 <= operations["IMMA"] < 72, operations
        # Addresses that a split needs when it ends, after its loop over pages; from 3.7 on some in it, too.
        assert spilled(assembler_notes(kernel, tmp_path)) <= SPILLED_BY_SPLIT + bound(0, 104, 632, 488)
        assert spills_in_shortest_loop(kernel, tmp_path, 64) <= bound(0, 11, 64, 76)
    else:
        assert spilled(assembler_notes(kernel, tmp_path)) <= SPILLED_OUTSIDE_LOOPS
        # Codes and scales go as they were loaded to the threads that multiply them; not queries and results.
        assert operations["STS"] + operations["STSM"] <= 48, operations
    # Nothing but page numbers and queries waits for memory: what belongs to a page is in flight ahead.
    queries = bound(16, 19, 19, 19) if name == "nvfp4" else 0
    assert operations["LDGSTS"] > operations["LDG"] - queries


def test_the_other_kernels_compile(tmp_path: Path):
    constants = {**HEADS, **TOKENS, **PLAIN, **PREFILL, **INT4}
    compiled(token_prefill._attend_tiles, constants, 4, 2, form=token_prefill.Form)
    constants = {**HEADS, **KVARN, **PLAIN, **PREFILL}
    compiled(kvarn_prefill._attend_tiles, constants, 4, 2, form=kvarn_prefill.Form, **AS_IT_CAME)
    compiled(kvarn_widen._widen, {**HEADS, **KVARN, "TOKENS": 64}, 4, 3, **AS_IT_CAME)
    compiled(held._hold, {**HEADS, **KVARN, "TOKENS": 32}, 4, 3, **AS_IT_CAME)
    appending = {**HEADS, **KVARN, "PER_HEAD": 4, "GROUP": 4, "LOG_DIM": 7, "PDL": True}
    kernel = compiled(held._append, appending, 1, 3, **AS_IT_CAME)
    # Keys, values, four rows of queries by two, and where they go.
    assert operations_of(kernel, tmp_path)["LDG"] == 7
    constants = {**HEADS, **KVARN, **DECODE, "LOG_DIM": 7, "SPLITS_AT_ONCE": 8, "sinks_ptr": None}
    compiled(kvarn_decode._merge_splits, constants, 1, 3)
    for is_nvfp4, scales in ((True, "*u8"), (False, "*fp16")):
        constants = {**HEADS, **TOKENS, "TOKENS": 32, "NVFP4": is_nvfp4}
        compiled(token_widen._widen, constants, 4, 3, scales_ptr=scales, out_ptr="*fp16")
    writing = {**HEADS, **KVARN, "LOG_DIM": 7, "ITERATIONS": 8, "REQUESTS": flush.REQUESTS}
    compiled(flush._flush_decoded, writing, 8, 3, **AS_IT_CAME)


@pytest.mark.parametrize("raw", exhaustive_but(["*bf16", "*fp16"], "*bf16"))
@pytest.mark.parametrize("name", ["decoded_kernel", "prompts_kernel"])
def test_programs_that_write_pages_share_a_multiprocessor(name: str, raw: str, tmp_path: Path):
    launched = flush_pages.launch(KVARN["GROUP_SIZE"], HEADS["DIM"])
    constants = {**HEADS, **KVARN, "REQUESTS": flush.REQUESTS}
    types = dict.fromkeys(RAW, raw)
    kernel = compiled(
        getattr(flush_pages, name), constants, launched["num_warps"], 1, launched["maxnreg"], **types
    )
    assert 2 * (kernel.metadata.shared + 1024) <= SHARED and 2 * 32 * 8 * launched["maxnreg"] <= REGISTERS
    operations = operations_of(kernel, tmp_path)
    # Of them 16 rotate.
    assert (
        operations["HMMA"] >= 192 + 16
        and spilled(assembler_notes(kernel, tmp_path)) <= 2 * SPILLED_OUTSIDE_LOOPS
    )
    # A program runs half of it, since it writes keys or values.
    assert operations.total() < 5500, operations


@pytest.mark.parametrize(
    "group_size, dim", exhaustive_but([(64, 64), (64, 128), (128, 256), (32, 64)], (64, 64))
)
def test_pages_of_other_sizes_are_rotated_by_the_warps_that_have_their_rows(group_size: int, dim: int):
    """A layout that does not fit the matrix units' is refused while compiling."""
    launched = flush_pages.launch(group_size, dim)
    constants = {**HEADS, **KVARN, "REQUESTS": flush.REQUESTS, "GROUP_SIZE": group_size, "DIM": dim}
    types = dict.fromkeys(RAW, "*fp32")
    compiled(flush_pages.decoded_kernel, constants, launched["num_warps"], 1, launched["maxnreg"], **types)
