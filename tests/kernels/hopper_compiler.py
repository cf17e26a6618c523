"""Compiles the Hopper kernels for any decoder with no GPU, and disassembles them; not a test by itself."""

import functools
import os
import re
import subprocess
from pathlib import Path

import triton
from scalegate.kernels.hopper import invariant, stream_k
from scalegate.kernels.hopper.decoder import Decoder
from scalegate.kernels.hopper.packed_operand import plain_layout, x_layout
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.experimental.gluon._runtime import GluonASTSource

ASSEMBLER = get_ptxas(90).path
"""Triton's own for this GPU: another may not know the PTX that it writes."""
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def hopper_source(
    tile, decoder: Decoder, factor: bool, odd_rows: bool, sequential: bool, tails: bool
) -> GluonASTSource:
    element = "fp16" if decoder.half else "bf16"
    x_element = element if decoder.x_bits == 16 else "fp8e4nv"
    words, scales = decoder.words_block(tile), decoder.scale_block(tile)
    is_invariant = isinstance(tile, invariant.Tile)
    bulk = is_invariant and tile.k_tiles == 1 and not odd_rows
    if is_invariant:
        kernel = invariant.invariant_kernel
        constants = invariant.constants(tile, decoder, bulk, sequential)
    else:
        kernel = stream_k.stream_k_kernel
        constants = {"FORM": stream_k.form_of(tile, decoder, 1001 if odd_rows else 1024, tails)}
    signature = dict.fromkeys(kernel.arg_names, "i32") | {
        "x_desc": f"tensordesc<{x_element}[{tile.m}, {tile.k_tiles * 64}],{x_layout(decoder.x_bits)!r}>",
        "words_desc": words_type(decoder, words),
        "scale_desc": f"tensordesc<i32{scales},{plain_layout(len(scales))!r}>",
        "y": f"*{element}",
        "factor": "*fp32",
        "partials": "*fp32",
        "semaphores": "*i32",
    }
    if not factor:
        constants |= {"factor": None}
    if not is_invariant:
        signature["table"] = "*i32"
        constants |= {} if decoder.table_bytes else {"table": None}
        signature["inverses"] = ("fp32",) * 5
    signature |= {name: "fp32" for name in kernel.arg_names if name.startswith("inv_")}
    if is_invariant:
        columns = tile.n if bulk else tile.k_tiles * 64
        signature["y_desc"] = f"tensordesc<{element}[{tile.m}, {columns}],{x_layout()!r}>"
    signature |= dict.fromkeys(constants, "constexpr")
    places = {name: (kernel.arg_names.index(name),) for name in signature}
    pointers = places.keys() & {"y", "partials", "semaphores", "table"}
    aligned = {places[name]: [["tt.divisibility", 16]] for name in pointers}
    return GluonASTSource(kernel, signature, {places[n]: v for n, v in constants.items()}, aligned)


def words_type(decoder: Decoder, block: list[int]) -> str:
    if decoder.in_shared:
        return f"tensordesc<fp8e4nv{block},{x_layout(8)!r}>"
    return f"tensordesc<i32{block},{plain_layout(len(block))!r}>"


@functools.cache
def compiled(
    tile,
    decoder: Decoder,
    factor: bool = False,
    odd_rows: bool = False,
    sequential: bool = False,
    tails: bool = False,
):
    source = hopper_source(tile, decoder, factor, odd_rows, sequential, tails)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=tile.options())


def disassembled(kernel, tmp_path: Path) -> list[str]:
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    text = subprocess.run([TOOLS / "cuobjdump", "-sass", cubin], capture_output=True, text=True, check=True)
    return re.findall(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", text.stdout)


def assembler_notes(kernel, tmp_path: Path) -> str:
    source = tmp_path / "kernel.ptx"
    source.write_text(kernel.asm["ptx"])
    command = [ASSEMBLER, "-v", "--gpu-name=sm_90a", source, "-o", os.devnull]
    return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def spilled(notes: str) -> int:
    """Bytes that are stored and loaded again, of the assembler's notes."""
    return sum(map(int, re.findall(r"(\d+) bytes spill", notes)))


def name_of(tile) -> str:
    kernel = type(tile).__module__.rpartition(".")[2]
    return f"{kernel}-{tile.m}x{tile.n}-{tile.ctas_per_sm}"


def loop_instructions(instructions: list[str]) -> list[str]:
    """The shortest loop with all wgmmas of a kernel; each instruction takes 16 bytes."""
    products = [i for i, text in enumerate(instructions) if "HGMMA" in text or "QGMMA" in text]
    loops = []
    for end, text in enumerate(instructions):
        branch = re.search(r"\bBRA (0x[0-9a-f]+)", text)
        start = int(branch[1], 16) // 16 if branch else end
        inside = sum(start <= i <= end for i in products)
        if start < end and inside:
            loops.append((-inside, end - start, instructions[start : end + 1]))
    return min(loops)[2]
