"""INT4 packed for FP8 activations: what a word holds, what its PTX makes of it, the reference, the tiles."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scalegate.kernels.hopper.packed_operand import SEMAPHORES
from scalegate.kernels.hopper.tile import NUM_SMS
from scalegate.kernels.int4 import e4m3_matmul, e4m3_packing
from scalegate.layouts.formats.int4 import Int4
from scalegate.layouts.packing.int4_fp8 import INT4_FP8
from scalegate.layouts.packing.layout import Problem

CPU = torch.device("cpu")
SHAPES = [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (2560, 9728), (8, 64)]


@pytest.mark.parametrize(("n", "k"), [(64, 64), (128, 192), (65, 80)])
def test_packing_is_undone_by_unpacking(n, k):
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8)
    numbers = e4m3_packing.unpack_words(e4m3_packing.pack_words(codes))
    assert torch.equal(numbers[:n, :k], codes.to(torch.int8) - 8)
    assert not numbers[n:].any() and not numbers[:, k:].any()


def test_a_word_holds_the_columns_that_the_matrix_unit_wants_in_one_register():
    codes = torch.randint(0, 16, (64, 64), dtype=torch.uint8)
    words = e4m3_packing.pack_words(codes).view(4, 8, 4, 2, 2)  # w, r, t, v, u
    warp, row, quad, right, below, slice_ = 2, 5, 3, 1, 1, 1
    column = 32 * slice_ + 16 * right + 4 * quad
    word = int(words[warp, row, quad, right, below])
    nibbles = [(word >> (8 * byte + 4 * slice_)) & 0xF for byte in range(4)]
    numbers = [-1 - (nibble >> 1) if nibble & 1 else nibble >> 1 for nibble in nibbles]
    line = codes[16 * warp + 8 * below + row]
    assert numbers == [int(code) - 8 for code in line[column : column + 4]]


ENTRY = """
.visible .entry decode(.param .u64 decode_param_0, .param .u64 decode_param_1, .param .u64 decode_param_2,
.param .u64 decode_param_3) .reqntid 128
{
.reg .b32 %r<5>;
.reg .b64 %rd<6>;
ld.param.u64 %rd0, [decode_param_0];
ld.param.u64 %rd1, [decode_param_1];
mov.u32 %r2, %tid.x;
mov.u32 %r3, %ctaid.x;
mad.lo.s32 %r3, %r3, 128, %r2;
mul.wide.u32 %rd2, %r3, 4;
add.s64 %rd3, %rd0, %rd2;
add.s64 %rd4, %rd1, %rd2;
ld.global.b32 %r0, [%rd3];
ASSEMBLY
st.global.b32 [%rd4], %r1;
ret;
}
"""


@pytest.mark.parametrize("slice_", [0, 1])
def test_the_decoder_makes_each_code_the_number_of_e4m3_that_it_stands_for(slice_):
    pytest.importorskip("triton")
    from scalegate.kernels.int4.e4m3_decoder import unpack_asm
    from scalegate.tests.kernels.ptx.emulator import Kernel
    from scalegate.tests.kernels.ptx.memory import Memory

    codes = torch.randint(0, 16, (64, 64), dtype=torch.uint8)
    words = e4m3_packing.pack_words(codes).view(-1)
    memory = Memory()
    memory.place("words", words.numpy())
    memory.place("decoded", np.zeros(512, np.int32))
    assembly = unpack_asm(slice_).replace("$0", "%r1").replace("$1", "%r0")
    kernel = Kernel(ENTRY.replace("ASSEMBLY", assembly.strip("{}\n")), 16, memory)
    kernel.launch((4, 1, 1), [memory.address("words"), memory.address("decoded")])
    decoded = torch.from_numpy(memory.read("decoded"))
    numbers = decoded.view(torch.uint8).view(torch.float8_e4m3fn).float() * e4m3_packing.SCALED_BY
    tile = numbers.view(4, 8, 4, 2, 2, 4).permute(0, 4, 1, 3, 2, 5).reshape(64, 32)  # of w, r, t, v, u, byte
    assert torch.equal(tile, codes[:, 32 * slice_ : 32 * slice_ + 32].float() - 8)


@pytest.mark.parametrize("group_size", [32, 64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_packed_weight_is_the_format_exactly(group_size, dtype):
    spec = Int4(group_size, symmetric=True, activations="fp8")
    weight = spec.random(100, 768, CPU)
    weight = weight.with_tensors({**weight.tensors(), "scale": weight.scale.to(dtype)})
    packed = INT4_FP8.pack(weight, torch.bfloat16)
    inputs = torch.randn(5, 768)
    codes, scale = spec.dynamic_input.codes(inputs)
    got = e4m3_packing.reference_matmul(
        codes, scale[:, 0], packed.tensors["words"], packed.tensors["scale_words"], 100,
        packed.attributes["group_size"],
    )  # fmt: skip
    expected = (codes.double() * scale.double()) @ weight.dequantize(torch.float64).T
    # The definition rounds each weight to float32, of which the packed one is the product.
    assert float((got - expected).norm() / expected.norm()) <= 2.0**-24


def test_splits_and_tiles_depend_on_the_bucket_of_m_alone_within_it():
    for low, high in ((1, 8), (9, 16), (17, 32), (33, 64), (65, 128)):
        for n, k in SHAPES:
            configs = [e4m3_matmul.config_for(m, n, k, 128) for m in (low, high)]
            assert configs[0] == configs[1]


@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_no_cta_is_idle_and_a_chunk_is_a_group(group_size):
    for m in (1, 9, 17, 64, 100, 128, 200, 256, 300, 512, 1000, 4096):
        for n, k in SHAPES:
            chosen = e4m3_matmul.config_for(m, n, k, group_size)
            tiles = chosen.tile.num_tiles(m, n)
            assert chosen.tile.slices * 16 == group_size
            assert 1 <= chosen.num_ctas <= tiles * -(-k // chosen.tile.iter_columns)
            slots = NUM_SMS * chosen.tile.ctas_per_sm
            assert chosen.num_ctas == tiles or chosen.num_ctas <= min(slots, SEMAPHORES)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (Int4(128, symmetric=True), "FP8 inputs"),
        (Int4(48, symmetric=True, activations="fp8"), "groups of 32, 64"),
    ],
)
def test_other_forms_of_int4_are_refused(spec, reason, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    problem = Problem(spec, 64, 768, torch.bfloat16, torch.device("cuda", 0))
    assert reason in INT4_FP8.refuses(problem)


@pytest.mark.parametrize(("capability", "reason"), [((8, 9), "9.0"), ((10, 0), "9.0")])
def test_other_gpus_and_batch_invariance_are_refused(capability, reason, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    spec = Int4(128, symmetric=True, activations="fp8")
    problem = Problem(spec, 64, 768, torch.bfloat16, torch.device("cuda", 0))
    assert reason in INT4_FP8.refuses(problem)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    assert INT4_FP8.refuses(problem) is None
    assert "batch-invariant" in INT4_FP8.refuses(replace(problem, batch_invariance="pin"))
