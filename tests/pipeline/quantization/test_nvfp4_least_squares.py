"""The NVFP4 solver: the best scale there is, exact in bf16, the same bits however it is run."""

import pytest
import torch
from scalegate.layouts.formats.int4 import unpack_nibbles
from scalegate.layouts.formats.nvfp4 import NVFP4, NVFP4Weight
from scalegate.pipeline.checkpoints.checkpoint import open_checkpoint
from scalegate.pipeline.quantization.quantizers.nvfp4_least_squares import quantize_nvfp4, shared_global_scale
from scalegate.pipeline.quantization.quantizers.quantizer import QuantizedWeight
from scalegate.pipeline.quantization.solvers import column_sums

MAGNITUDES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
EVERY_SCALE = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()


@pytest.fixture
def weight() -> torch.Tensor:
    return torch.randn(64, 512, generator=torch.Generator().manual_seed(0)).mul_(0.02).to(torch.bfloat16)


@pytest.fixture
def trained(example_checkpoint) -> torch.Tensor:
    return open_checkpoint(example_checkpoint).read("model.layers.0.self_attn.q_proj.weight")


def solve(weight: torch.Tensor) -> QuantizedWeight:
    return quantize_nvfp4(weight, NVFP4(), shared_global_scale(float(weight.abs().max())))


def squared_errors(weight: torch.Tensor, solved: NVFP4Weight) -> torch.Tensor:
    """fp64 [groups]."""
    remainder = solved.dequantize(torch.float32).double() - weight.double()
    return remainder.square().view(-1, 16).sum(-1)


def errors_of_scales(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """fp64 [scales, groups], with the nearest of the eight magnitudes looked up."""
    x = weight.double().abs().view(-1, 16)
    found = []
    for scale in scales.double():
        values = MAGNITUDES.double() * scale
        found.append((x.unsqueeze(-1) - values).abs().amin(-1).square().sum(-1))
    return torch.stack(found)


def same(a: NVFP4Weight, b: NVFP4Weight) -> bool:
    raw = [(t.view(torch.uint8), u.view(torch.uint8)) for t, u in ((a.codes, b.codes), (a.scale, b.scale))]
    return all(torch.equal(*pair) for pair in raw) and torch.equal(a.global_scale, b.global_scale)


def test_no_scale_is_better_than_the_one_it_finds(trained) -> None:
    solved = solve(trained[:64])
    best = errors_of_scales(trained[:64], EVERY_SCALE * solved.weight.global_scale).amin(0)
    found = squared_errors(trained[:64], solved.weight)
    assert float(found.sum() / best.sum()) < 1.00001
    # The usual scale is far from it.
    usual = trained[:64].float().abs().view(-1, 16).amax(-1) / 6 / solved.weight.global_scale
    rounded = usual.to(torch.float8_e4m3fn).float() * solved.weight.global_scale
    plain = sum(
        float(errors_of_scales(group, scale.view(1))[0, 0])
        for group, scale in zip(trained[:2].reshape(-1, 1, 16), rounded, strict=False)
    )
    assert plain > 1.1 * float(best[: trained[:2].numel() // 16].sum())


def test_the_reported_error_is_that_of_the_stored_weight(weight) -> None:
    solved = solve(weight)
    assert solved.weight.shape == (64, 512)
    assert solved.squared_error == pytest.approx(float(squared_errors(weight, solved.weight).sum()), rel=1e-5)
    assert solved.squared_norm == pytest.approx(float(weight.double().square().sum()), rel=1e-6)


def test_values_are_exact_in_bf16_and_scales_survive_being_a_divisor(weight) -> None:
    solved = solve(weight).weight
    exact = solved.dequantize(torch.float32)
    assert torch.equal(solved.dequantize(torch.bfloat16).float(), exact)
    assert torch.equal(solved.global_scale.reciprocal().reciprocal(), solved.global_scale)
    # amax / 2688, as others have it, is not: that is what the power of two is for.
    other = quantize_nvfp4(weight, NVFP4(), weight.float().abs().max() / 2688).weight
    assert not torch.equal(other.dequantize(torch.bfloat16).float(), other.dequantize(torch.float32))


@pytest.mark.parametrize("largest", [1.0, 0.0299, 448 * 4.0, 448 * 4.0 * 1.0001, 3e-26, 1e27])
def test_the_global_scale_leaves_room_for_the_largest_weight(largest: float) -> None:
    scale = float(shared_global_scale(largest))
    assert largest / 4 <= 448 * scale < largest / 2 * 1.0000001


def test_what_nvfp4_can_say_comes_back_unchanged(weight) -> None:
    once = solve(weight).weight.dequantize(torch.float32)
    again = solve(once)
    assert torch.equal(again.weight.dequantize(torch.float32), once)
    assert again.squared_error == 0


def test_threads_and_chunks_do_not_change_the_bits(weight, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = solve(weight)
    for threads in (1, 2, 5):
        for chunk in (512, 3 * 512, 1 << 20):
            monkeypatch.setattr(column_sums, "available_cores", lambda threads=threads: threads)
            monkeypatch.setattr(column_sums, "CPU_CHUNK", chunk)
            again = solve(weight)
            assert same(again.weight, expected.weight)
            assert again.squared_error == expected.squared_error


@pytest.mark.gpu
def test_a_gpu_gives_the_same_bits(weight) -> None:
    shared = shared_global_scale(float(weight.abs().max()))
    gpu = quantize_nvfp4(weight.cuda(), NVFP4(), shared.cuda())
    cpu = quantize_nvfp4(weight, NVFP4(), shared)
    assert same(gpu.weight.to("cpu"), cpu.weight)
    assert gpu.squared_error == cpu.squared_error


def test_strange_groups_stay_exact_or_close() -> None:
    weight = torch.zeros(7, 32)
    weight[1] = 0.5
    weight[2] = -0.25
    weight[3, 7] = 3.0
    weight[4] = torch.linspace(1.0, 2.0, 32)
    weight[5] = -(torch.arange(32) % 16) * 0.125
    weight[6] = torch.randn(32, generator=torch.Generator().manual_seed(1)) * 1e-12
    solved = solve(weight).weight
    back = solved.dequantize(torch.float32)
    assert bool(torch.isfinite(back).all())
    assert torch.equal(back[:3], weight[:3])
    assert torch.allclose(back[3], weight[3], rtol=0.04, atol=0)
    assert torch.allclose(back[4:6], weight[4:6], rtol=0.2, atol=0.07)
    # Below what E4M3 reaches under the largest weight's scale.
    assert bool((back[6] == 0).all())
    # No negative zeros: a code with nothing but a sign would differ from itself read back.
    assert not bool((unpack_nibbles(solved.codes) == 8).any())


def test_a_weight_of_zeros_is_zeros() -> None:
    assert bool((solve(torch.zeros(4, 64)).weight.dequantize() == 0).all())
