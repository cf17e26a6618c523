"""Products in AMX's tiles: their code on every CPU of x86, and where there is AMX, oneDNN's beside ours."""

import os
import platform
import subprocess
import sys

import pytest
import torch
from scalegate.kernels.cpu.coded_matmul import has_amx
from scalegate.layouts.formats.int4 import Int4
from scalegate.layouts.formats.int8 import Int8
from scalegate.layouts.formats.iq2_xxs import IQ2XXS
from scalegate.layouts.formats.nvfp4 import NVFP4
from scalegate.layouts.packing.all_layouts import LAYOUTS
from scalegate.layouts.packing.cpu_tiles import CPU_AMX
from scalegate.layouts.packing.layout import Problem

FEATURES = "+avx2,+fma,+avx512f,+avx512bw,+avx512vl,+avx512dq,+avx512bf16,+amx-tile,+amx-bf16"
COMPILE = """
import sys
from numba import cfunc, types
from scalegate.kernels.cpu import coded_matmul
part = coded_matmul._part("", *map(int, sys.argv[1:]))
print(cfunc(types.void(types.int64))(part)._library.get_asm_str())
"""
CPU = torch.device("cpu")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="LLVM needs its code generator for x86")
@pytest.mark.parametrize("codes, scales", [(0, 0), (0, 1), (1, 3), (2, 2), (3, 2)])
def test_tiles_are_loaded_multiplied_and_released(codes, scales):
    """Compiled for Sapphire Rapids, whatever this CPU is."""
    environment = {**os.environ, "NUMBA_CPU_NAME": "sapphirerapids", "NUMBA_CPU_FEATURES": FEATURES}
    command = [sys.executable, "-P", "-c", COMPILE, "3", str(codes), str(scales)]
    code = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    instructions = [line.split()[0] for line in code.splitlines() if line.strip()]
    assert instructions.count("ldtilecfg") == instructions.count("tilerelease") == 1
    products, tiles = instructions.count("tdpbf16ps"), instructions.count("tileloadd")
    assert products >= 4 and products % 4 == 0
    assert tiles == products // 4 * 5, "x is loaded once for the four tiles of the weight"
    assert instructions.count("tilestored") == instructions.count("tilezero") == 4


@pytest.mark.parametrize("layout", CPU_AMX, ids=lambda layout: layout.name)
def test_a_cpu_without_amx_is_refused_by_name(layout, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: False)
    problem = Problem(layout.format(), 256, 256, torch.bfloat16, CPU)
    assert layout.refuses(problem) == "is for CPUs with AMX"


@pytest.mark.skipif(not has_amx(), reason="needs a CPU with AMX")
@pytest.mark.parametrize("spec", [Int4(64), NVFP4(), IQ2XXS(), Int8(128)], ids=lambda spec: spec.key)
def test_onednns_tiles_and_ours_do_not_disturb_each_other(spec):
    torch.manual_seed(3)
    weight = spec.random(512, 512, CPU)
    ours = next(layout for layout in CPU_AMX if isinstance(spec, layout.format))
    problem = Problem(spec, 512, 512, torch.bfloat16, CPU)
    assert ours.refuses(problem) is None
    packed = ours.pack(weight, torch.bfloat16)
    beside, x = torch.randn(512, 512).bfloat16(), torch.randn(64, 512).bfloat16()
    y, product = ours.matmul(x, packed), x @ beside
    for _ in range(20):
        assert torch.equal(ours.matmul(x, packed), y)
        assert torch.equal(x @ beside, product)
    exact = x.double() @ weight.dequantize(torch.float64).T
    assert ((y - exact).norm() / exact.norm()).item() < 3e-3
    tiles = LAYOUTS[ours.name.replace("amx", "tiles")]
    assert ((y - tiles.matmul(x, tiles.pack(weight, torch.bfloat16))).norm() / exact.norm()).item() < 3e-3
