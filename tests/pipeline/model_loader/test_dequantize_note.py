"""What is served by dequantizing at every step is said, with what would help."""

from dataclasses import replace

import pytest
import torch
from scalegate.layouts.choosing.choose import default_layout
from scalegate.layouts.formats.fp8 import FP8
from scalegate.layouts.formats.int4 import Int4
from scalegate.layouts.formats.nvfp4 import NVFP4
from scalegate.layouts.packing.layout import Problem
from scalegate.pipeline.model_loader.dequantize_note import dequantized_note, emulation_note

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("dtype", "words"),
    [(torch.float16, "in float16 on cpu. `--dtype bfloat16` has a kernel for it"), (torch.bfloat16, None)],
)
def test_a_product_without_a_kernel_is_said_and_one_with_is_not(dtype, words):
    problem = Problem(Int4(group_size=64), 256, 256, dtype, CPU)
    note = dequantized_note({"up": problem}, {"up": default_layout(problem)})
    assert (note is None) if words is None else (note is not None and words in note)


def test_the_format_is_called_by_its_own_name():
    note = dequantized_note({"up": Problem(NVFP4(), 256, 256, torch.bfloat16, CPU)}, {"up": "dequantize"})
    assert note is not None and "(NVFP4) are dequantized anew at every step" in note


def test_what_is_emulated_is_said_with_what_that_is_worth():
    plain = Problem(NVFP4(), 256, 256, torch.bfloat16, CPU)
    fp8 = replace(plain, spec=FP8())
    assert emulation_note({"up": plain}, {"up": "cpu_dequantized"}) is None
    assert emulation_note({"up": fp8}, {"up": "fp8_scaled"}) is None
    note = emulation_note({"up": plain, "down": fp8}, {"up": "cpu_dequantized", "down": "cpu_emulated"})
    assert note is not None and "1 of 2 quantized products (FP8" in note and "in 32 bits" in note
