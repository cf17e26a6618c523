"""The kernels of the gated delta rule compile once for a model, fit every architecture, and spill nothing."""

from pathlib import Path

import pytest

pytest.importorskip("triton")

import torch
from scalegate.kernels.states.batch import StateBatch
from scalegate.kernels.states.gated_delta_rule import gated_delta_rule
from scalegate.tests.kernels.architectures.pretended_gpu import LaunchRecord, pretended_gpu
from scalegate.tests.kernels.architectures.test_every_kernel_compiles import SHARED_KIB, fault

STEPS = [(3, 3, True), (70, 3, False), (1, 1, True), (1, 1, False), (64, 64, True), (4096, 17, False)]
"""Tokens, requests, and whether all requests decode."""


def launched(
    capability: int, steps, width: int, by_channel: bool, dtype: torch.dtype = torch.bfloat16
) -> LaunchRecord:
    """What steps launch of a layer with keys and values of that width, of which the inputs are views."""
    heads, key_heads = 4, 2
    with pretended_gpu(capability) as record:
        slots = torch.zeros(3, heads, width, width)
        for tokens, requests, decode_only in steps:
            mixed = torch.zeros(tokens, (2 * key_heads + heads) * width, dtype=dtype)
            query, key, value = mixed.split([key_heads * width, key_heads * width, heads * width], 1)
            query, key = (each.view(tokens, key_heads, width) for each in (query, key))
            value = value.view(tokens, heads, width)
            log_decay = torch.zeros(tokens, heads, width) if by_channel else torch.zeros(tokens, heads)
            batch = StateBatch(
                torch.zeros(requests + 1, dtype=torch.int32),
                torch.zeros(requests, dtype=torch.int32),
                torch.zeros(requests, dtype=torch.int64),
                decode_only,
            )
            rate = torch.zeros(tokens, heads, dtype=dtype)
            gated_delta_rule(query, key, value, log_decay, rate, slots, batch, torch.empty_like(value))
    return record


@pytest.mark.parametrize("by_channel", [False, True])
def test_steps_of_all_sizes_take_the_same_three_kernels(by_channel):
    record = launched(90, STEPS, 128, by_channel)
    assert len({launch.name for launch in record.launches.values()}) == 3
    assert len(record.launches) == 3, "something is compiled again for another step"


@pytest.mark.parametrize(
    "width, by_channel", [(16, False), (64, False), (128, False), (256, False), (64, True), (128, True)]
)
@pytest.mark.parametrize("capability", [80, 89, 90, 100, 120])
@pytest.mark.exhaustive
@pytest.mark.long
def test_every_kernel_fits_every_architecture(capability, width, by_channel, tmp_path: Path):
    record = launched(capability, STEPS[:2], width, by_channel)
    faults = [
        fault(launch, capability, SHARED_KIB[capability], tmp_path) for launch in record.launches.values()
    ]
    assert faults == [None] * 3
