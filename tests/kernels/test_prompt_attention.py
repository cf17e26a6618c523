"""Which kernel takes a step of prompts: a function of the step, and of nothing else."""

from dataclasses import replace

import pytest
import torch
from scalegate.kernels.prompt_attention import Step, hopper_takes

LARGE = Step(4096, 4, 128, 64, (torch.bfloat16, torch.bfloat16), 0, False)
HOPPER = (9, 0)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"group": 1},
        {"head_dim": 256, "group": 16, "page": 128},
        {"dtypes": (torch.bfloat16, torch.float16), "scale_dims": 1},
        {"dtypes": (torch.float16, torch.float16)},
    ],
)
def test_large_steps_on_hopper_are_for_the_kernel_written_for_it(change: dict):
    assert hopper_takes(replace(LARGE, **change), HOPPER)


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": 1024},
        {"one_form": True},
        {"head_dim": 64},
        {"head_dim": 96},
        {"head_dim": 512},
        {"group": 256},
        {"page": 8},
        {"dtypes": (torch.float32, torch.float32)},
        {"dtypes": (torch.float16, torch.bfloat16)},
        {"dtypes": (torch.bfloat16, torch.float8_e4m3fn), "scale_dims": 1},
        {"dtypes": (torch.bfloat16, torch.float16), "scale_dims": 3},
    ],
    ids=str,
)
def test_what_it_does_not_take_is_left_to_the_other_one(change: dict):
    assert not hopper_takes(replace(LARGE, **change), HOPPER)


@pytest.mark.parametrize("capability", [(0, 0), (8, 0), (8, 9), (10, 0), (12, 0)])
def test_other_gpus_keep_the_other_one(capability: tuple[int, int]):
    assert not hopper_takes(LARGE, capability)
