"""IQ2_XXS through the portable kernel compiles to what its decoder promises, with no GPU.

That it fits and compiles for every architecture is looked at in `../architectures/`.
"""

import re
from typing import Any

import pytest

pytest.importorskip("triton")

import torch
from scalegate.kernels.portable import iq2_xxs
from scalegate.kernels.triton_imports import FOUR_IN_A_ROW
from scalegate.layouts.formats.iq2_xxs import IQ2XXS
from scalegate.layouts.packing.portable import IQ2_XXS_PORTABLE
from scalegate.tests.kernels.architectures.pretended_gpu import GPU, pretended_gpu

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def compiled() -> Any:
    """The form for one row, for 8.0."""
    with pretended_gpu(80) as recording:
        packed = IQ2_XXS_PORTABLE.pack(IQ2XXS().random(256, 1024, GPU), torch.bfloat16)
        IQ2_XXS_PORTABLE.matmul(torch.zeros(1, 1024, dtype=torch.bfloat16, device=GPU), packed)
    [launch] = recording.launches.values()
    return launch, launch.compile(80)


def test_the_decoder_names_the_parameter_that_is_the_table(compiled):
    launch, kernel = compiled
    given = [name for name, kind in launch.source.signature.items() if kind != "constexpr"]
    assert given.index("table") == int(iq2_xxs.TABLE.rpartition("_")[2])
    assert f".entry {iq2_xxs.TABLE.rpartition('_param')[0]}(" in kernel.asm["ptx"]


def test_weights_are_decoded_in_the_registers_of_the_product(compiled):
    """Only sums pass through shared memory; in a form in which weights do, 128 stores write them."""
    _, kernel = compiled
    ptx = kernel.asm["ptx"]
    pairs = ptx.count("ld.global.nc.b32"), 2 * ptx.count("ld.global.nc.v2.b32")
    assert pairs == ((0, 64) if FOUR_IN_A_ROW else (64, 0)), "64 x 128 weights by 64 threads"
    # Which the decoder takes for granted: as many columns in a row in a lane.
    columns = "4" if FOUR_IN_A_ROW else "2"
    assert set(re.findall(r"opIdx = 0, parent = #mma, kWidth = (\d)", kernel.asm["ttgir"])) == {columns}
    assert len(re.findall(r"st\.shared|stmatrix", ptx)) < 16
    assert not re.search(r"shfl\.sync", ptx)
