"""The INT8 solver: as exact as promised, no worse than rounding under the largest weight, the same bits."""

import pytest
import torch
from scalegate.layouts.formats.int4 import Int4
from scalegate.layouts.formats.int8 import WHOLE_ROW, Int8, Int8Weight
from scalegate.pipeline.quantization.quantizers.int4_least_squares import quantize_int4
from scalegate.pipeline.quantization.quantizers.int8_least_squares import quantize_int8
from scalegate.pipeline.quantization.solvers import column_sums

SIZES = [32, 128, WHOLE_ROW]


@pytest.fixture
def weight() -> torch.Tensor:
    return torch.randn(64, 4096, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)


def relative_error(weight: torch.Tensor, quantized: Int8Weight) -> float:
    return float((quantized.dequantize(torch.float32) - weight.float()).norm() / weight.float().norm())


def under_the_largest(weight: torch.Tensor, groups: int) -> float:
    """The relative error of round to nearest with nothing clipped, the scale in bf16."""
    x = weight.float().view(len(weight), groups, -1)
    scale = (x.abs().amax(-1, keepdim=True) / 127).bfloat16().float()
    rounded = (x / scale).round().clamp(-128, 127) * scale
    return float((rounded - x).norm() / x.norm())


@pytest.mark.parametrize("size", SIZES)
def test_the_reported_error_is_that_of_the_stored_weight(weight: torch.Tensor, size: int) -> None:
    solved = quantize_int8(weight, Int8(size))
    assert solved.weight.shape == tuple(weight.shape)
    assert solved.weight.codes.dtype == torch.int8 and solved.weight.scale.dtype == torch.bfloat16
    assert solved.relative_error == pytest.approx(relative_error(weight, solved.weight), rel=1e-3)


@pytest.mark.parametrize(("size", "share"), [(32, 1.0), (128, 1.0), (WHOLE_ROW, 0.99)])
def test_it_is_no_worse_than_rounding_under_the_largest_weight(weight, size: int, share: float) -> None:
    """And clips a little of a whole row, where that pays."""
    plain = under_the_largest(weight, Int8(size).groups(weight.shape[1]))
    assert quantize_int8(weight, Int8(size)).relative_error < share * plain


def test_its_error_is_a_seventeenth_of_that_of_four_bits(weight: torch.Tensor) -> None:
    """255 steps for 15."""
    ratio = quantize_int4(weight, Int4(128)).relative_error / quantize_int8(weight, Int8(128)).relative_error
    assert 14 < ratio < 18


@pytest.mark.parametrize("size", SIZES)
def test_threads_and_chunks_do_not_change_the_bits(weight, size, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = quantize_int8(weight, Int8(size))
    for threads, chunk in ((1, 4096), (2, 3 * 4096), (5, 1 << 20)):
        monkeypatch.setattr(column_sums, "available_cores", lambda threads=threads: threads)
        monkeypatch.setattr(column_sums, "CPU_CHUNK", chunk)
        again = quantize_int8(weight, Int8(size))
        assert torch.equal(again.weight.codes, expected.weight.codes)
        assert torch.equal(again.weight.scale, expected.weight.scale)
        assert again.squared_error == expected.squared_error


@pytest.mark.gpu
def test_a_gpu_gives_the_same_bits(weight: torch.Tensor) -> None:
    here, there = quantize_int8(weight, Int8()).weight, quantize_int8(weight.cuda(), Int8()).weight.to("cpu")
    assert torch.equal(here.codes, there.codes) and torch.equal(here.scale, there.scale)


def test_strange_groups_stay_exact_or_close() -> None:
    weight = torch.zeros(6, 128)
    weight[1] = 0.5
    weight[2, 7] = -3.0
    weight[3] = torch.arange(128) - 64.0
    weight[4] = torch.randn(128, generator=torch.Generator().manual_seed(1)) * 1e-30
    weight[5] = torch.randn(128, generator=torch.Generator().manual_seed(2)) * 1e15
    back = quantize_int8(weight, Int8(128)).weight.dequantize(torch.float32)
    assert bool(torch.isfinite(back).all()) and bool((back[0] == 0).all())
    assert torch.allclose(back[1:3], weight[1:3], rtol=0.005, atol=0)
    for row in (3, 4, 5):
        assert float((back[row] - weight[row]).double().norm() / weight[row].double().norm()) < 0.01


def test_a_width_that_the_groups_do_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="K = 96 is no multiple of group size 64"):
        quantize_int8(torch.zeros(4, 96), Int8(64))
