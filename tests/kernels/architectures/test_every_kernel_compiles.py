"""Every kernel that a server may launch compiles for seven architectures, with no GPU.

The list is made by starting engines and by the registry of layouts (`every_launch.py`), so a new layout joins
it by being registered. A kernel must fit the shared memory that a CTA has there, and the assembler takes
nothing that its architecture does not have.
"""

import ast
import functools
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

import scalegate.kernels
import torch
from scalegate.layouts.formats.iq2_xxs import IQ2XXS
from scalegate.layouts.formats.weight_format import WeightFormat
from scalegate.layouts.packing.all_layouts import LAYOUTS
from scalegate.layouts.packing.hopper import HopperLayout
from scalegate.layouts.packing.iq2_xxs import IQ2XXSLayout
from scalegate.layouts.packing.layout import Problem
from scalegate.tests.kernels.architectures.every_launch import record
from scalegate.tests.kernels.architectures.pretended_gpu import GPU, Launch, pretended_gpu
from scalegate.tests.kernels.hopper_compiler import TOOLS
from scalegate.tests.kernels.triton_versions import bound

pytestmark = [pytest.mark.long, pytest.mark.exhaustive]

SHARED_KIB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99, 121: 99}
"""What a CTA can have on each architecture, by NVIDIA's table of compute capabilities."""
ONE_FORM = (90, 100, 121)
"""Where one form of each kernel is compiled, to save minutes: GPU tests run all forms on Hopper, 10.0 has as
much shared memory, and 12.1 has instructions and shared memory of 12.0."""
HOPPERS_OWN = {
    "stream_k_kernel", "invariant_kernel", "iq2_xxs_one_row_kernel", "hopper_prefill_kernel",
    "_dequantize_kernel",
}  # fmt: skip
BELOW_AMPERE = {"_flush_decoded", "_flush_prompts"}
"""Launched below compute capability 8.0 alone: by the interpreter."""
MOST_SPILLED = {
    "attention": bound(512, 640, 712, 712), "experts": 64, "portable": bound(8, 8, 16, 16),
    "invariant_matmul": bound(8, 16, 16, 16), "states": bound(8, 24, 48, 16),
}  # fmt: skip
"""Bytes of a thread, by folder or file of `kernels/`; none in others. Eight to 48 are one form's for
12.0, or that of IQ2_XXS for 64 rows and 8.0 where a lane has two columns, or scans of states: 3.7 and 3.8
keep more of them in registers from 10.0 on. What spills most are forms for float32, whose numbers take two
registers where bf16's take one. The tiles were chosen by time on an H200 with 3.6."""

TO_E4M3_BY_WAY_OF_FP16, TO_ODD = "cvt.rn.satfinite.e4m3x2.f16x2", ", -8192;"
"""Triton's conversion of fp32 for 8.9, and the bits that `kernels/e4m3.py` clears before it."""

launched = functools.cache(record)


def to_compile(capability: int) -> list[Launch]:
    """All launches, or with ONE_FORM the first of each kernel."""
    launches = launched(capability).launches.values()
    if capability not in ONE_FORM:
        return [*launches]
    return [*{launch.kernel: launch for launch in reversed(launches)}.values()]


def fault(launch: Launch, capability: int, shared_kib: int, scratch: Path) -> str | None:
    """Why a server could not launch this on that architecture, or why it would be slow; None for neither."""
    try:
        kernel = launch.compile(capability)
    except Exception as error:
        return f"does not compile: {type(error).__name__}: {str(error).strip()[-200:]}"
    if kernel.metadata.shared > shared_kib * 1024:
        return f"takes {kernel.metadata.shared} bytes of shared memory, of {shared_kib * 1024}"
    if re.search(rf"\.target sm_{capability}\w?,?\s", kernel.asm["ptx"]) is None:
        return "was compiled for another architecture"
    if capability == 89 and TO_E4M3_BY_WAY_OF_FP16 in kernel.asm["ptx"] and TO_ODD not in kernel.asm["ptx"]:
        return "rounds twice on the way to E4M3"
    folder = launch.kernel.fn.__module__.partition("kernels.")[2].partition(".")[0]
    spilled = stack_bytes(kernel, scratch)
    return f"spills {spilled} bytes" if spilled > MOST_SPILLED.get(folder, 0) else None


def stack_bytes(kernel: Any, scratch: Path) -> int:
    """Bytes of spilled registers and of local arrays of a thread."""
    cubin = scratch / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    usage = [TOOLS / "cuobjdump", "-res-usage", cubin]
    shown = subprocess.run(usage, capture_output=True, check=True, text=True).stdout
    return int(re.search(r"STACK:(\d+)", shown)[1])


# Some 170 forms are compiled, each in seconds if Triton has not cached it.
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("capability", SHARED_KIB)
def test_every_form_of_every_kernel_compiles_and_fits(capability: int, tmp_path: Path):
    faults = []
    for launch in to_compile(capability):
        reason = fault(launch, capability, SHARED_KIB[capability], tmp_path)
        if reason is not None:
            constants = [*launch.source.constants.values()]
            faults.append(f"{launch.kernel.fn.__module__}.{launch.name} {reason}: {constants}")
    assert not faults, "\n".join(faults)


def test_a_kernel_that_takes_too_much_shared_memory_is_found(tmp_path: Path):
    launch = next(launch for launch in launched(80).launches.values() if launch.name == "_attend_splits")
    assert fault(launch, 80, 1, tmp_path).startswith("takes ")


def test_no_kernel_is_left_out():
    """Every `kernel[grid](...)` in the sources was launched by what makes the list."""
    sources = Path(scalegate.kernels.__file__).parent
    launches = {launch for path in sources.rglob("*.py") for launch in launches_in(path)}
    assert len(launches) >= 30
    recorded = {
        (launch.kernel.fn.__module__.partition("kernels.")[2], launch.name)
        for capability in (80, 90, 100)
        for launch in launched(capability).launches.values()
    }
    missing = {
        f"{path.relative_to(sources)}: {name}"
        for path, name in launches
        if name not in BELOW_AMPERE
        and not any(name == known and imports_or_has(path, module) for module, known in recorded)
    }
    assert not missing


def launches_in(path: Path) -> Iterator[tuple[Path, str]]:
    """File and kernel of each call of a subscripted name: `kernel[grid](...)`."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
            kernel = node.func.value
            if isinstance(kernel, ast.Name):
                yield path, kernel.id


def imports_or_has(path: Path, module: str) -> bool:
    """Whether the kernels of `module` are that file's own, or are imported there."""
    name = module.rpartition(".")[2]
    return path.stem == name or f"from .{name} import" in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("capability", [capability for capability in SHARED_KIB if capability != 90])
def test_hoppers_kernels_are_offered_on_hopper_alone(capability: int):
    assert names(90) >= HOPPERS_OWN and not names(capability) & HOPPERS_OWN
    with pretended_gpu(capability):
        for _, layout in LAYOUTS.items():
            if isinstance(layout, HopperLayout | IQ2XXSLayout):
                spec = spec_of(layout)
                mode = "pin" if layout.name.endswith("_invariant") else "tuned"
                problem = Problem(spec, 256, 1024, torch.bfloat16, GPU, batch_invariance=mode)
                assert "compute capability 9.0" in layout.refuses(problem)


def names(capability: int) -> set[str]:
    return {launch.name for launch in launched(capability).launches.values()}


def spec_of(layout: HopperLayout | IQ2XXSLayout) -> WeightFormat:
    return IQ2XXS() if isinstance(layout, IQ2XXSLayout) else layout.packing.format()
