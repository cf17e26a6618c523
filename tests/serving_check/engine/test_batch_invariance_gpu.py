"""The same on a GPU: no company changes a bit under `pin` and `per-token`, and `tuned` drifts."""

import copy
import itertools

import pytest
import torch
from scalegate.base.batch_invariance import INVARIANCE_MODES
from scalegate.kernels.attention.options import AttentionOptions
from scalegate.kernels.attention.prefill import LARGE, prefill_attention, tiles_of
from scalegate.kernels.device import compute_capability, keeps_sums_in_registers
from scalegate.layouts.formats.int4 import Int4
from scalegate.layouts.formats.nvfp4 import NVFP4
from scalegate.layouts.formats.unquantized import Unquantized
from scalegate.layouts.packing.all_layouts import LAYOUTS
from scalegate.layouts.packing.grouped_experts import GroupedDequantize, GroupedUnquantized
from scalegate.layouts.packing.layout import Experts, Problem
from scalegate.layouts.packing.routing import Routing
from scalegate.serving_check.engine.engine import Engine
from scalegate.serving_check.engine.options import EngineOptions
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from ...needs_e4m3 import marked
from .test_batch_invariance import (
    SIZES,
    A,
    Request,
    alone,
    company,
    drifted,
    drifted_in_company,
    model_of,
    recorded,
    run,
)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

PLAIN_EXPERTS = {GroupedUnquantized.name, GroupedDequantize.name}


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_no_company_changes_a_bit_unless_tuned(kind: str):
    model = model_of(kind, torch.bfloat16).cuda()
    everyone, found = [A, *company(24, 3, 250)], {}
    for mode in ("tuned", "pin", "per-token"):
        options = EngineOptions(batch_invariance=mode, max_model_len=320, kv_cache_tokens=48000)
        engine = Engine(copy.deepcopy(model), options, frozenset())
        engine.warm_up(progress=False)
        found[mode] = drifted_in_company(engine, everyone)
    assert not any(found["pin"].values()), found["pin"]
    assert not any(found["per-token"].values()), found["per-token"]
    if kind == "dense":  # of these experts an H100 takes the same kernels in every company
        assert any(found["tuned"].values()), "nothing was proved"


def with_wide_heads() -> PreTrainedModel:
    """Heads of 64 channels, as low-bit formats take them."""
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "head_dim": 64}
    torch.manual_seed(11)
    config = Qwen3Config(**SIZES | sizes)
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).cuda().eval()


CODED = ["int4_per_token_head", "nvfp4", "int8_per_token_head", "kvarn_k4v2_g64", "kvarn_k4v2_g128"]


@pytest.mark.parametrize("kv_format", [marked(name) for name in CODED])
def test_no_company_changes_a_bit_over_coded_keys_and_values(kv_format: str):
    """Also where its prompt is read in a step so large that `tuned` decodes its pages first; the longest have
    a page of KVarN's codes in either size."""
    options = EngineOptions(
        batch_invariance="pin", max_model_len=320, kv_cache_tokens=48000, kv_cache_dtype=kv_format
    )
    engine = Engine(with_wide_heads(), options, frozenset())
    engine.warm_up(progress=False)
    found = drifted_in_company(engine, [A, *company(24, 3, 300)])
    assert not any(found.values()), found


def drifted_when_preempted(model: PreTrainedModel, requests: list[Request], **options: str) -> int:
    """Rows of logits that are other bits than alone, where every third step takes a request's pages."""
    sizes = {"max_model_len": 320, "kv_cache_tokens": 48000, "overlapped": False}
    engine = Engine(copy.deepcopy(model), EngineOptions(**sizes, **options), frozenset())
    engine.warm_up(progress=False)
    expected = alone(engine, requests)
    step, steps = engine.step, itertools.count(1)

    def preempting():
        if next(steps) % 3 == 0 and len(engine.scheduler.running) > 1:
            engine.scheduler._preempt_last()
        return step()

    engine.step = preempting
    again = recorded(engine)
    run(engine, requests)
    assert engine.scheduler.preemptions > 1
    return drifted(expected, again)


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_what_is_computed_again_after_a_preemption_has_the_same_bits_unless_tuned(kind: str):
    model, requests = model_of(kind, torch.bfloat16).cuda(), [A, *company(23, 30, 250)]
    found = {
        mode: drifted_when_preempted(model, requests, batch_invariance=mode) for mode in INVARIANCE_MODES
    }
    assert (found["pin"], found["per-token"]) == (0, 0), found
    assert found["tuned"], "nothing was proved"


@pytest.mark.parametrize("kv_format", ["int4_per_token_head", "kvarn_k4v2_g64"])
def test_codes_that_are_computed_again_after_a_preemption_have_the_same_bits_unless_tuned(kv_format: str):
    """Requests whose third page of 64 becomes full while they decode."""
    model, requests = with_wide_heads(), [A, *company(7, 187, 191)]
    found = {
        mode: drifted_when_preempted(model, requests, batch_invariance=mode, kv_cache_dtype=kv_format)
        for mode in ("tuned", "pin")
    }
    assert found["pin"] == 0, found
    assert found["tuned"], "nothing was proved"


@pytest.mark.parametrize("one_form", [True, False])
@pytest.mark.parametrize("cut", [1, 64, 100, 1500])
def test_a_tokens_attention_does_not_follow_the_cut_of_its_prompt(cut: int, one_form: bool):
    """Nor, with one_form off, how many rows a program takes, except by mma.sync."""
    torch.manual_seed(3)
    tokens, heads, kv_heads, dim, page = 1500, 8, 2, 128, 64
    count = -(-tokens // page)
    q = torch.randn(tokens, heads, dim, device="cuda").bfloat16()
    pages = [torch.randn(count, kv_heads, page, dim, device="cuda").bfloat16() for _ in range(2)]
    table = torch.arange(count, dtype=torch.int32, device="cuda")[None]
    options = AttentionOptions(dim**-0.5)

    def attended(size: int) -> torch.Tensor:
        out = torch.empty_like(q)
        for start in range(0, tokens, size):
            part = slice(start, min(start + size, tokens))
            tiles = torch.from_numpy(tiles_of(0, [(part.stop - start, start, 0)], 0)).cuda()
            prefill_attention(q[part], *pages, table, tiles, options, out[part], one_form)
        return out

    whole, found = attended(1024), attended(cut)
    in_one_form = one_form or cut <= LARGE or not keeps_sums_in_registers(compute_capability(q.device))
    assert torch.equal(found, whole) or not in_one_form
    last = torch.empty_like(q[:1])
    length = torch.tensor([tokens], dtype=torch.int32, device="cuda")
    prefill_attention(q[-1:].contiguous(), *pages, table, length, options, last, one_form=True)
    assert torch.equal(last, whole[-1:])


@pytest.mark.parametrize("spec", [Unquantized(), Int4(128), NVFP4()], ids=lambda spec: spec.name)
def test_every_layout_that_claims_it_keeps_a_rows_bits(spec):
    torch.manual_seed(5)
    device, n, k = torch.device("cuda"), 4096, 4096
    problem = Problem(spec, n, k, torch.bfloat16, device, batch_invariance="pin")
    serving = [name for name, layout in LAYOUTS.items() if layout.refuses(problem) is None]
    assert serving
    weight = spec.random(n, k, device)
    x = torch.randn(600, k, device=device).bfloat16()
    for name in serving:
        packed = LAYOUTS[name].pack(weight, torch.bfloat16)
        expected = torch.cat([LAYOUTS[name].matmul(row, packed) for row in x[:64].split(1)])
        for m in (2, 7, 16, 17, 33, 64, 128, 200, 300, 600):
            assert torch.equal(LAYOUTS[name].matmul(x[:m], packed)[:64], expected[:m]), (name, m)
        assert torch.equal(LAYOUTS[name].matmul(x.roll(9, 0), packed)[9:73], expected), name


@pytest.mark.parametrize("spec", [Unquantized(), Int4(128), NVFP4()], ids=lambda spec: spec.name)
def test_every_layout_of_experts_that_claims_it_keeps_a_rows_bits(spec):
    """However many rows its expert gets. Under `tuned` packed weights do not: their blocks of eight rows have
    two sums of K. Plain ones sum alike in every block."""
    torch.manual_seed(5)
    device, count, n, k = torch.device("cuda"), 16, 768, 2048
    problem = Problem(spec, n, k, torch.bfloat16, device, Experts(count, 2), "pin")
    serving = [name for name, layout in LAYOUTS.items() if layout.refuses(problem) is None]
    assert serving
    weights = [spec.random(n, k, device) for _ in range(count)]
    x = torch.randn(1200, k, device=device).bfloat16()
    expert = torch.rand(1200, count, device=device).topk(2).indices

    def multiplied(name: str, packed, rows: slice, mode: str) -> torch.Tensor:
        routing = Routing.of(expert[rows].contiguous(), count, mode)
        return LAYOUTS[name].grouped_matmul(x[rows].contiguous(), packed, routing)

    for name in serving:
        packed = LAYOUTS[name].pack_experts(weights, torch.bfloat16)
        drift = dict.fromkeys(("tuned", "pin", "per-token"), 0)
        for mode in drift:
            alone = torch.cat([multiplied(name, packed, slice(i, i + 1), mode) for i in range(64)])
            for size in (2, 7, 33, 64, 100, 300, 1200):
                found = multiplied(name, packed, slice(0, size), mode)[:128]
                drift[mode] += not torch.equal(found, alone[: len(found)])
            turned = multiplied(name, packed, slice(9, 600), mode)[:110]
            drift[mode] += not torch.equal(turned, alone[18:])
        assert (drift["pin"], drift["per-token"]) == (0, 0), (name, drift)
        assert drift["tuned"] or name in PLAIN_EXPERTS, f"{name}: nothing was proved"
