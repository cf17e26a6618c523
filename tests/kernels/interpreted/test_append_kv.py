"""Storing keys and values into pages, against the reference; see conftest.py."""

import pytest
import torch
from scalegate.kernels.attention import append_kv as append_kv_module
from scalegate.kernels.attention.append_kv import append_kv, append_kv_reference

from ...needs_e4m3 import NEEDS_E4M3

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAGES, KV_HEADS, PAGE, HEAD_DIM = 5, 2, 16, 96


def scales_for(dtype: torch.dtype) -> torch.Tensor | None:
    if dtype == torch.float8_e4m3fn:
        return torch.tensor([0.25, 2.0], device=DEVICE)
    if dtype == torch.int8:
        return torch.zeros(PAGES, KV_HEADS, PAGE, device=DEVICE)
    return None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn, torch.int8], ids=str)
@pytest.mark.parametrize("several_a_program", [False, True])
def test_tokens_land_in_their_slots_and_nowhere_else(dtype, several_a_program: bool, monkeypatch):
    if several_a_program:
        monkeypatch.setattr(append_kv_module, "LARGE", 0)
    generator = torch.Generator().manual_seed(1)
    slots = torch.tensor([79, 0, -1, 33, 16, *range(48, 68)], device=DEVICE)
    # Integers over powers of two need no rounding to e4m3, which the interpreter does wrongly at 1.11111b.
    fused = torch.randint(-7, 8, (len(slots), 3 * KV_HEADS * HEAD_DIM), generator=generator).float()
    key, value = (
        part.view(len(slots), KV_HEADS, HEAD_DIM)
        for part in fused.to(DEVICE).split(KV_HEADS * HEAD_DIM, dim=1)[1:]
    )
    assert not key.is_contiguous()
    pages = (
        torch.randint(-7, 8, (2, PAGES, KV_HEADS, PAGE, HEAD_DIM), generator=generator).to(dtype).to(DEVICE)
    )
    key_scale, value_scale = scales_for(dtype), scales_for(dtype)
    want_keys, want_key_scale = append_kv_reference(key, pages[0], slots, key_scale)
    want_values, want_value_scale = append_kv_reference(value, pages[1], slots, value_scale)

    append_kv(key, value, slots, pages[0], pages[1], key_scale, value_scale)

    assert torch.equal(pages[0].float(), want_keys.float())
    assert torch.equal(pages[1].float(), want_values.float())
    if dtype == torch.int8:
        torch.testing.assert_close(key_scale, want_key_scale)
        torch.testing.assert_close(value_scale, want_value_scale)


def test_e4m3_saturates_instead_of_overflowing():
    key = torch.full((1, KV_HEADS, HEAD_DIM), 1e6, device=DEVICE)
    pages = torch.zeros(PAGES, KV_HEADS, PAGE, HEAD_DIM, device=DEVICE).to(torch.float8_e4m3fn)
    scale = torch.ones(KV_HEADS, device=DEVICE)
    append_kv(key, -key, torch.zeros(1, dtype=torch.int64, device=DEVICE), pages, pages.clone(), scale, scale)
    assert pages[0, :, 0].float().eq(448.0).all()


@pytest.mark.gpu
@NEEDS_E4M3
def test_e4m3_rounds_as_torch_does():
    generator = torch.Generator().manual_seed(2)
    key = torch.randn(64, KV_HEADS, HEAD_DIM, generator=generator).cuda()
    pages = torch.zeros(PAGES, KV_HEADS, PAGE, HEAD_DIM, device="cuda").to(torch.float8_e4m3fn)
    slots = torch.randperm(PAGES * PAGE, generator=generator)[:64].cuda()
    scale = torch.tensor([0.013, 0.31], device="cuda")
    want, _ = append_kv_reference(key, pages, slots, scale)
    append_kv(key, key, slots, pages, pages.clone(), scale, scale)
    assert torch.equal(pages.float(), want.float())
