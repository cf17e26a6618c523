"""Which kernel takes a step of prompts: a function of the step, and of nothing else."""

from dataclasses import replace

import pytest
import torch
from scalegate.kernels.attention import choose_prefill
from scalegate.kernels.attention.choose_prefill import Step, hopper_takes
from scalegate.kernels.attention.options import AttentionOptions

BF16, FP16, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
LARGE = Step(4096, 4, 128, 64, (BF16, BF16, BF16), 0, False)
HOPPER = (9, 0)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"group": 1},
        {"head_dim": 256, "group": 16, "page": 128},
        {"dtypes": (BF16, FP16, FP16), "scale_dims": 1},
        {"dtypes": (BF16, E4M3, FP16), "scale_dims": 1},
        {"dtypes": (FP16, FP16, FP16)},
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
        {"dtypes": (torch.float32, torch.float32, torch.float32)},
        {"dtypes": (FP16, BF16, BF16)},
        {"dtypes": (BF16, E4M3, E4M3), "scale_dims": 1},
        {"dtypes": (BF16, torch.int8, FP16), "scale_dims": 1},
        {"dtypes": (BF16, E4M3, FP16), "scale_dims": 1, "one_form": True},
        {"dtypes": (BF16, FP16, FP16), "scale_dims": 3},
    ],
    ids=str,
)
def test_what_it_does_not_take_is_left_to_the_other_one(change: dict):
    assert not hopper_takes(replace(LARGE, **change), HOPPER)


@pytest.mark.parametrize("capability", [(0, 0), (8, 0), (8, 9), (10, 0), (12, 0)])
def test_other_gpus_keep_the_other_one(capability: tuple[int, int]):
    assert not hopper_takes(LARGE, capability)


class KernelCalls:
    """Stands for both kernels, widening and the GPU, and keeps what a kernel was given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, hopper_runs: bool = True):
        monkeypatch.setattr(choose_prefill, "compute_capability", lambda device: HOPPER)
        monkeypatch.setattr(choose_prefill, "hopper_runs", lambda *of: hopper_runs)
        monkeypatch.setattr(choose_prefill, "widen_pages", lambda stored, pages: stored[pages].half())
        for name in ("hopper_prefill", "prefill_attention"):
            monkeypatch.setattr(choose_prefill, name, self.kernel(name))

    def kernel(self, name: str):
        def keep(q, keys, values, table, tiles, options, out, last):
            """last: the table of keys, or whether bits are kept."""
            self.name, self.keys, self.values, self.table = name, keys, values, table
            self.options, self.last = options, last

        return keep

    def attend(self, dtype: torch.dtype, scale_shape: tuple[int, ...], one_form: bool) -> None:
        scale = torch.arange(6.0)[: scale_shape[0]].view(-1, *scale_shape[1:])
        stored = torch.arange(6).view(6, 1, 1, 1).expand(6, 2, 64, 128)
        choose_prefill.attend_prefill(
            torch.zeros(4096, 8, 128, dtype=BF16),
            stored.to(dtype),
            stored.to(dtype),
            torch.tensor([[5, 3]]),
            torch.zeros(1, 4),
            AttentionOptions(1.0, key_scale=scale, value_scale=scale),
            out=torch.zeros(0),
            one_form=one_form,
            widened=(torch.tensor([5, 3]), torch.tensor([[0, 1]])),
        )


def test_keys_of_e4m3_stay_where_they_lie_and_values_are_widened(monkeypatch: pytest.MonkeyPatch):
    calls = KernelCalls(monkeypatch)
    calls.attend(E4M3, (2,), one_form=False)
    assert calls.name == "hopper_prefill"
    assert calls.keys.dtype == E4M3 and len(calls.keys) == 6
    assert calls.values.dtype == FP16 and calls.values[:, 0, 0, 0].tolist() == [5, 3]
    assert calls.last.tolist() == [[5, 3]] and calls.table.tolist() == [[0, 1]]


def test_where_the_kernel_for_hopper_does_not_run_the_other_one_takes_its_steps(monkeypatch):
    calls = KernelCalls(monkeypatch, hopper_runs=False)
    calls.attend(E4M3, (2,), one_form=False)
    assert calls.name == "prefill_attention" and not calls.last
    assert calls.keys.dtype == calls.values.dtype == FP16


def test_that_it_does_not_run_is_said_once_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def does_not_compile(*tensors, **options):
        raise RuntimeError("at 41:13:\nresult shared-memory footprint exceeds the source view\n")

    monkeypatch.setattr(choose_prefill, "hopper_prefill", does_not_compile)
    asked = torch.device("cpu"), (BF16, BF16, BF16), 256
    choose_prefill.hopper_runs.cache_clear()
    assert not choose_prefill.hopper_runs(*asked)
    assert not choose_prefill.hopper_runs(*asked)
    said = capsys.readouterr().err
    assert said.count("RuntimeError: result shared-memory footprint exceeds") == 1
    monkeypatch.setattr(choose_prefill, "hopper_prefill", lambda *tensors, **options: None)
    assert not choose_prefill.hopper_runs(*asked), "it is tried once"
    choose_prefill.hopper_runs.cache_clear()
    assert choose_prefill.hopper_runs(*asked)
    choose_prefill.hopper_runs.cache_clear()


def test_where_bits_are_kept_keys_and_values_are_widened(monkeypatch: pytest.MonkeyPatch):
    calls = KernelCalls(monkeypatch)
    calls.attend(E4M3, (2,), one_form=True)
    assert calls.name == "prefill_attention" and calls.last is True
    assert calls.keys.dtype == calls.values.dtype == FP16
    assert calls.keys[:, 0, 0, 0].tolist() == [5, 3] and calls.table.tolist() == [[0, 1]]


def test_int8_is_widened_with_the_scales_of_its_pages(monkeypatch: pytest.MonkeyPatch):
    calls = KernelCalls(monkeypatch)
    calls.attend(torch.int8, (6, 1, 1), one_form=False)
    assert calls.name == "prefill_attention" and calls.keys.dtype == FP16
    assert calls.options.key_scale.flatten().tolist() == [5, 3]
