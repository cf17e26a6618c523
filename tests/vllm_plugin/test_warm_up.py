"""What a layer compiles before vLLM serves is all that any number of rows takes."""

import pytest
import torch
from scalegate.kernels.hopper import invariant_config, stream_k_config
from scalegate.vllm_plugin import warm_up
from scalegate.vllm_plugin.warm_up import rows_to_compile

SHAPES = [(6144, 4096), (4096, 12288), (24576, 4096), (2560, 9728), (1536, 2048), (57344, 8192)]
MOST = 8192


def form(m: int, n: int, k: int, batch_invariant: bool) -> object:
    if batch_invariant:
        return invariant_config.tile_for(m, n, k)
    config = stream_k_config.config_for(m, n, k)
    return config.tile, config.head_iters > 0


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_every_number_of_rows_finds_its_kernel_compiled(n, k, batch_invariant):
    rows = rows_to_compile(n, k, MOST, batch_invariant).values()
    compiled = {form(m, n, k, batch_invariant) for m in rows}
    # All rows up to 1024, and then odd numbers that no table names.
    served = [*range(1, 1025), *range(1025, MOST + 1, 61), MOST]
    assert {form(m, n, k, batch_invariant) for m in served} <= compiled
    assert len(rows) == len(compiled), "each form is compiled once"


def test_no_more_rows_than_a_step_may_have():
    assert max(rows_to_compile(4096, 4096, 512, False).values()) <= 512
    assert [*rows_to_compile(4096, 4096, 1, False).values()] == [1]


def test_no_graph_that_is_captured_records_the_warm_up(monkeypatch):
    warmed = []
    monkeypatch.setattr(warm_up, "PENDING", [lambda: warmed.append("layer")])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    warm_up.warm_up_pending()
    assert not warmed
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    warm_up.warm_up_pending()
    warm_up.warm_up_pending()
    assert warmed == ["layer"]
