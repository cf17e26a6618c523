"""Layers with a state on a GPU: greedy tokens are those of `generate`, whatever runs beside a request."""

import copy
from dataclasses import replace
from typing import Any

import pytest
from scalegate.base.errors import UserError
from scalegate.serving_check.engine.engine import Engine
from scalegate.serving_check.engine.options import EngineOptions
from scalegate.tests.serving_check.engine.test_states import (
    GREEDY,
    MIXED,
    expected,
    generated,
    prompts,
    source,
)

pytestmark = pytest.mark.gpu

PAGE = 16
SIZES = {"device": "cuda", "max_num_seqs": 4, "max_model_len": 96, "page_size": PAGE, "prefill_chunk": 40}
COMPILED = ("qwen3_5_text", "mamba2", "lfm2", "jamba", "minimax")
"""One for each state that GPUs are bought for, and what is computed by another's kernels."""


def engine_of(kind: str, **options: Any) -> Engine:
    engine = Engine(copy.deepcopy(source(kind)).cuda(), EngineOptions(**SIZES | options), frozenset())
    engine.warm_up(progress=False)
    return engine


def answers(engine: Engine) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in engine.generate(prompts(), GREEDY)]


@pytest.mark.parametrize("kind", MIXED)
def test_tokens_are_those_of_generate(kind: str):
    engine = engine_of(kind, compiled=False, prefill_chunk=13)
    assert answers(engine) == expected(kind)
    assert engine.stats().compilations == ()


@pytest.mark.parametrize("kind", MIXED)
def test_preempted_requests_go_on_as_if_they_had_not_been(kind: str):
    # Three requests grow from two pages to five each, and ten are all there are.
    asked = [prompts()[-1][start : start + 2 * PAGE - 2] for start in range(4)]
    engine = engine_of(kind, compiled=False, kv_cache_tokens=10 * PAGE)
    found = engine.generate(asked, replace(GREEDY, max_tokens=3 * PAGE))
    assert [completion.token_ids for completion in found] == generated(kind, asked, 3 * PAGE)
    assert engine.scheduler.preemptions > 0
    assert engine.stats().compilations == ()


@pytest.mark.parametrize("kind", COMPILED)
def test_tokens_of_compiled_layers_are_those_of_generate(kind: str, capsys: pytest.CaptureFixture[str]):
    engine = engine_of(kind)
    for _ in range(2):  # The second time in slots that were used.
        assert answers(engine) == expected(kind)
    assert engine.stats().compilations == ()
    assert "served uncompiled" not in capsys.readouterr().err


def test_batch_invariance_is_refused_by_name():
    with pytest.raises(UserError, match=r"--batch-invariance pin cannot be kept on a GPU: .* with a state"):
        engine_of("lfm2", batch_invariance="pin")
