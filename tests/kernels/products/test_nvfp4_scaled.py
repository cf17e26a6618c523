"""NVFP4 times NVFP4 as it would be served on Blackwell: the instruction, and the scales it is given.

Its arithmetic without the instruction is in `../interpreted/`.
"""

import re

import pytest

pytest.importorskip("triton")

import torch
from scalegate.kernels.nvfp4.scaled_matmul import TILES, ScaledTile
from scalegate.kernels.triton_imports import SCALES_ON_12_1
from scalegate.layouts.choosing.subject import subject_of
from scalegate.layouts.choosing.tried import tried
from scalegate.layouts.formats.nvfp4 import NVFP4, NVFP4Input
from scalegate.layouts.modules.linear import QuantizedLinear
from scalegate.layouts.packing.layout import Problem
from scalegate.layouts.packing.nvfp4_scaled import NVFP4_SCALED
from scalegate.tests.exhaustive import exhaustive_but
from scalegate.tests.kernels.architectures.pretended_gpu import GPU, pretended_gpu

INSTRUCTIONS = {
    100: r"tcgen05\.mma\.cta_group::1\.kind::mxf4nvf4\.block_scale",
    120: r"mma\.sync\.aligned\.m16n8k64\.row\.col\.kind::mxf4nvf4\.block_scale",
    121: r"mma\.sync\.aligned\.m16n8k64\.row\.col\.kind::mxf4nvf4\.block_scale",
}
W4A4 = NVFP4(activations=True)
CASES = [(capability, tile) for capability in INSTRUCTIONS for tile in TILES]


@pytest.mark.parametrize(
    ("capability", "tile"), exhaustive_but(CASES, (100, TILES[0]), (120, TILES[0])), ids=str
)
def test_codes_are_multiplied_by_codes(capability: int, tile: ScaledTile):
    """Older versions of Triton compile nothing of it for 12.1, where the layout then refuses."""
    if capability == 121 and not SCALES_ON_12_1:
        with pytest.raises(RuntimeError):
            kernel_for(capability, tile.bm)
        return
    ptx = kernel_for(capability, tile.bm).asm["ptx"]
    found = set(re.findall(r"(?:tcgen05\.mma|mma\.sync|wgmma)[\w.:]*", ptx))
    assert found and all(re.match(INSTRUCTIONS[capability], name) for name in found)


def kernel_for(capability: int, rows: int):
    with pretended_gpu(capability) as recording:
        packed = NVFP4_SCALED.pack(W4A4.random(256, 1024, GPU), torch.bfloat16)
        NVFP4_SCALED.matmul(torch.zeros(rows, 1024, dtype=torch.bfloat16, device=GPU), packed)
    [launch] = [launch for launch in recording.launches.values() if launch.name == NVFP4_SCALED.kernel]
    return launch.compile(capability)


@pytest.mark.parametrize(("divides", "factor"), [(False, 0.02), (True, 0.005)])
def test_a_layer_gives_the_kernel_its_checkpoints_scale_and_rounds_nothing_itself(divides, factor):
    weight = W4A4.random(32, 64, torch.device("cpu"))
    packed = NVFP4_SCALED.pack(weight, torch.bfloat16)
    layer = QuantizedLinear(packed, None, NVFP4Input(torch.tensor(2.0), divides))
    assert float(layer.packed.tensors["factor"]) == pytest.approx(factor)
    assert float(layer.input_scale) == 2.0 and layer.packed.attributes == {"divides": int(divides)}
    assert not layer._rounds_before


def test_it_is_offered_on_blackwell_alone_as_compiled_only_and_for_rounded_inputs_alone():
    served = {}
    for capability in (89, 90, 100, 120, 121):
        with pretended_gpu(capability):
            served[capability] = NVFP4_SCALED.refuses(Problem(W4A4, 256, 1024, torch.bfloat16, GPU))
            plain = NVFP4_SCALED.refuses(Problem(NVFP4(), 256, 1024, torch.bfloat16, GPU))
            assert plain == "is for NVFP4 with NVFP4 inputs"
    assert served[100] is served[120] is None
    assert (served[121] is None) == SCALES_ON_12_1
    assert all("Blackwell" in served[capability] for capability in (89, 90))
    assert tried(NVFP4_SCALED, (10, 0)) == tried(NVFP4_SCALED, (12, 0)) == "compiled only"


def test_inputs_of_a_measurement_are_values_of_the_format():
    """So that the product is the float32 one's, and a chooser can tell a wrong kernel."""
    subject = subject_of(Problem(W4A4, 32, 64, torch.bfloat16, torch.device("cpu")), 3)
    example = W4A4.example_input
    assert torch.equal(example.round(subject.x.float()), subject.x.float())
    assert not torch.equal(example.round(subject.x.float() * 1.01), subject.x.float() * 1.01)
