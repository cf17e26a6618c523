"""The INT4 solver: as exact as promised, better than plain methods, the same bits however it is run."""

from dataclasses import replace

import pytest
import torch
from scalegate.layouts.formats.int4 import Int4, Int4Weight, unpack_nibbles
from scalegate.pipeline.checkpoints.checkpoint import open_checkpoint
from scalegate.pipeline.quantization.quantizers.int4_least_squares import quantize_int4
from scalegate.pipeline.quantization.quantizers.torchao_hqq import quantize_int4_fractional
from scalegate.pipeline.quantization.solvers import column_sums
from scalegate.pipeline.quantization.solvers.integer_least_squares import INT4_CODES, centred_codes, search


@pytest.fixture
def weight() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(64, 512, generator=generator).to(torch.bfloat16)


@pytest.fixture(params=["model.layers.0.self_attn.q_proj.weight", "model.layers.2.mlp.down_proj.weight"])
def trained(request: pytest.FixtureRequest, example_checkpoint) -> torch.Tensor:
    return open_checkpoint(example_checkpoint).read(request.param)


def relative_error(weight: torch.Tensor, quantized: Int4Weight) -> float:
    return float((quantized.dequantize(torch.float32) - weight.float()).norm() / weight.float().norm())


def min_max(weight: torch.Tensor, group_size: int) -> torch.Tensor:
    x = weight.float().view(weight.shape[0], -1, group_size)
    low, high = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True).clamp(min=0)
    scale = ((high - low) / 15).bfloat16().float()
    zero = torch.round(-low / scale)
    return ((torch.clamp(torch.round(x / scale) + zero, 0, 15) - zero) * scale).view(weight.shape)


def same(a: Int4Weight, b: Int4Weight) -> bool:
    return all(torch.equal(getattr(a, part), getattr(b, part)) for part in ("codes", "scale", "zero_point"))


@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("symmetric", [False, True])
def test_the_reported_error_is_that_of_the_stored_weight(weight, group_size: int, symmetric: bool) -> None:
    solved = quantize_int4(weight, Int4(group_size, symmetric))
    assert solved.weight.shape == tuple(weight.shape)
    assert solved.relative_error == pytest.approx(relative_error(weight, solved.weight), rel=1e-4)
    assert int(solved.weight.zero_point.max()) <= 15
    assert not symmetric or bool((solved.weight.zero_point == 8).all())


@pytest.mark.parametrize("group_size", [64, 128])
def test_it_beats_min_max_and_the_fractional_method_on_trained_weights(trained, group_size: int) -> None:
    ours = quantize_int4(trained, Int4(group_size)).relative_error
    plain = float((min_max(trained, group_size) - trained.float()).norm() / trained.float().norm())
    fractional = quantize_int4_fractional(
        trained, Int4(group_size, zero_point="fractional"), torch.bfloat16
    ).relative_error
    assert ours < 0.99 * plain
    assert ours <= fractional


def test_the_search_finds_what_an_exhaustive_one_finds(weight) -> None:
    weight = weight[:16]
    solved = quantize_int4(weight, Int4(128))
    x = weight.float().view(16, 4, 128)
    scale, zero = solved.weight.scale.float().unsqueeze(-1), solved.weight.zero_point.float().unsqueeze(-1)
    best = torch.full((16, 4), torch.inf)
    for step in range(-3, 4):
        for factor in torch.arange(0.8, 1.2, 0.005).tolist():
            s, z = (scale * factor).bfloat16().float(), (zero + step).clamp(0, 15)
            codes = torch.clamp(torch.round(x / s) + z, 0, 15)
            best = torch.minimum(best, ((codes - z) * s - x).square().sum(-1))
    exhaustive = float((best.sum() / x.square().sum()).sqrt())
    assert solved.relative_error < 1.002 * exhaustive


def test_symmetric_groups_turn_the_longer_side_of_the_codes_to_where_it_is_needed(trained) -> None:
    """-8..7 or -7..8: what is lost to zero points is under half of what one sign alone would lose."""
    spec = Int4(128, symmetric=True)
    solved = quantize_int4(trained, spec)
    assert bool((solved.weight.scale < 0).any()) and bool((solved.weight.scale > 0).any())
    with_zero_points = quantize_int4(trained, Int4(128)).relative_error
    x = trained.float().view(trained.shape[0], -1, 128).permute(2, 0, 1).flatten(1).contiguous()
    one_sign = replace(INT4_CODES, signs=(1,))
    scale, zero = search(x, one_sign, symmetric=True, scale_dtype=torch.bfloat16)
    alone = float((centred_codes(x, scale, zero, one_sign) * scale - x).norm() / x.norm())
    assert with_zero_points < solved.relative_error < (alone + with_zero_points) / 2


def test_threads_and_chunks_do_not_change_the_bits(weight, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = quantize_int4(weight, Int4(128))
    for threads in (1, 2, 5):
        for chunk in (512, 3 * 512, 1 << 20):
            monkeypatch.setattr(column_sums, "available_cores", lambda threads=threads: threads)
            monkeypatch.setattr(column_sums, "CPU_CHUNK", chunk)
            again = quantize_int4(weight, Int4(128))
            assert same(again.weight, expected.weight)
            assert again.squared_error == expected.squared_error


@pytest.mark.gpu
def test_a_gpu_gives_the_same_bits(weight) -> None:
    assert same(
        quantize_int4(weight.cuda(), Int4(128)).weight.to("cpu"), quantize_int4(weight, Int4(128)).weight
    )


@pytest.mark.parametrize("symmetric", [False, True])
def test_strange_groups_stay_exact_or_close(symmetric: bool) -> None:
    weight = torch.zeros(8, 128)
    weight[1] = 0.5
    weight[2] = -0.25
    weight[3, 7] = 3.0
    weight[4] = torch.linspace(1.0, 2.0, 128)
    weight[5] = torch.arange(128) % 16 * 0.125 - 1.0
    weight[6] = torch.randn(128, generator=torch.Generator().manual_seed(1)) * 1e-30
    weight[7] = torch.randn(128, generator=torch.Generator().manual_seed(2)) * 1e15
    solved = quantize_int4(weight, Int4(128, symmetric)).weight
    back = solved.dequantize(torch.float32)
    assert bool(torch.isfinite(back).all())
    assert bool((back[0] == 0).all())
    assert torch.allclose(back[1:4], weight[1:4], rtol=0.005, atol=0)
    assert torch.allclose(back[5], weight[5], rtol=0.005, atol=1e-7)
    for row in (6, 7):
        error = (back[row] - weight[row]).double().norm() / weight[row].double().norm()
        assert float(error) < 0.15


@pytest.mark.parametrize("scale_dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_scale_is_optimal_as_it_is_stored(weight, scale_dtype: torch.dtype) -> None:
    solved = quantize_int4(weight, Int4(128), scale_dtype=scale_dtype)
    assert solved.weight.scale.dtype == scale_dtype
    assert solved.relative_error < 0.102


@pytest.mark.parametrize("group_size", [16, 48, 96])
def test_group_sizes_that_are_no_powers_of_two(group_size: int) -> None:
    weight = torch.randn(8, group_size * 6, generator=torch.Generator().manual_seed(3))
    solved = quantize_int4(weight, Int4(group_size))
    assert solved.relative_error == pytest.approx(relative_error(weight, solved.weight), rel=1e-4)


def test_fractional_zeros_come_from_torchao_unchanged(weight) -> None:
    solved = quantize_int4_fractional(weight, Int4(64, zero_point="fractional"), torch.bfloat16)
    assert not solved.weight.spec.has_integer_zero
    assert float((solved.weight.zero_point % 1 != 0).float().mean()) > 0.5
    assert solved.relative_error == pytest.approx(relative_error(weight, solved.weight), rel=1e-4)
    assert int(unpack_nibbles(solved.weight.codes).max()) == 15
