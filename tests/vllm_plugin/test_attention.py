"""Our attention backend for int4 keys and values is registered as CUSTOM, and says why it refuses a model.

What its kernels compute is in `tests/kernels/interpreted/test_int4_pages_of_vllm.py`.
"""

import functools
import importlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scalegate.tests.vllm_plugin import stand_in
from scalegate.vllm_plugin import int4_pages

FITTING = {"head_size": 128, "dtype": torch.bfloat16, "kv_cache_dtype": "int4_per_token_head"}


@pytest.fixture
def vllm(monkeypatch):
    monkeypatch.delenv("SCALEGATE_KERNELS", raising=False)
    found = stand_in.install(monkeypatch)
    monkeypatch.setattr(importlib.import_module("scalegate.vllm_plugin.cache_key"), "SERVED", set())
    importlib.import_module("scalegate.vllm_plugin.register").register()
    return found


@pytest.fixture
def attention(vllm):
    return importlib.import_module("scalegate.vllm_plugin.attention")


def test_it_is_the_backend_called_custom(vllm, attention):
    ours, backend = vllm.backends.CUSTOM, attention.ScalegateAttentionBackend
    assert ours.get_path() == f"{backend.__module__}.{backend.__qualname__}"
    assert backend.get_name() == ours.name, "vLLM looks it up by its name"


def test_a_model_that_fits_is_served(vllm, attention):
    assert attention.ScalegateAttentionBackend.validate_configuration(**FITTING) == []


MISFITS = [
    ("model_config.get_sliding_window", lambda: 4096, "sliding window"),
    ("model_config.hf_text_config.layer_types", ["full_attention", "sliding_attention"], "several kinds"),
    ("model_config.is_hybrid", True, "several kinds"),
    ("model_config.hf_text_config.attention_chunk_size", 8192, "sliding window"),
    ("speculative_config", object(), "speculative decoding"),
    ("cache_config.kv_cache_dtype_skip_layers", ["0"], "--kv-cache-dtype-skip-layers"),
    ("cache_config.kv_sharing_fast_prefill", True, "--kv-sharing-fast-prefill"),
    ("parallel_config.decode_context_parallel_size", 2, "context parallelism"),
    ("parallel_config.use_ubatching", True, "micro-batches"),
]


@pytest.mark.parametrize(("path", "value", "told"), MISFITS, ids=[path for path, _, _ in MISFITS])
def test_a_configuration_that_does_not_fit_is_refused(vllm, attention, path, value, told):
    *parts, name = path.split(".")
    setattr(functools.reduce(getattr, parts, vllm.config), name, value)
    [reason] = attention.ScalegateAttentionBackend.validate_configuration(**FITTING)
    assert told in reason


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("head_size", 96, "head_size"),
        ("dtype", torch.float32, "dtype"),
        ("kv_cache_dtype", "fp8", "kv_cache_dtype"),
        ("block_size", 16, "block_size"),
        ("has_sliding_window", True, "sliding window"),
        ("use_kv_connector", True, "KV connector"),
    ],
)
def test_a_layer_that_does_not_fit_is_refused(attention, name, value, told):
    [reason] = attention.ScalegateAttentionBackend.validate_configuration(**(FITTING | {name: value}))
    assert told in reason


def layer(attention, **changed):
    given = {"num_kv_heads": 2, "head_size": 64, "head_size_v": 64, "impl": None, **changed}
    backend = attention.ScalegateAttentionBackend
    given["impl"] = given["impl"] or attention.ScalegateAttention(4, 64, 0.125, 2)
    return SimpleNamespace(attn_backend=backend, **given)


def builder(vllm, attention, layers, monkeypatch):
    """A builder whose layers are warm: kernels do not run here."""
    monkeypatch.setattr(attention, "warm_up", lambda *arguments: WARMED.append(arguments))
    monkeypatch.setattr(attention, "WARM", set())
    WARMED.clear()
    vllm.config.compilation_config.static_forward_context = layers
    spec = SimpleNamespace(num_kv_heads=2, head_size=64)
    return attention.StepBuilder(spec, list(layers), vllm.config, torch.device("cpu"))


WARMED: list[tuple] = []


def test_layers_of_a_kind_share_scratch_memory_and_are_warmed_up_once(vllm, attention, monkeypatch):
    layers = {"0": layer(attention), "1": layer(attention)}
    builder(vllm, attention, layers, monkeypatch)
    first, second = (each.impl for each in layers.values())
    assert first.workspace is second.workspace
    assert first.workspace.partial.shape[:2] == (4, 4), "as many requests as vLLM runs at once, and heads"
    assert len(WARMED) == 1
    served = [line for line in vllm.log if "serves keys and values in int4_per_token_head" in line]
    assert len(served) == 1


@pytest.mark.parametrize("other", [{"head_size": 128, "head_size_v": 128}, {"num_kv_heads": 1}], ids=str)
def test_a_model_with_other_pages_beside_ours_does_not_start(vllm, attention, monkeypatch, other):
    layers = {"0": layer(attention), "1": layer(attention, **other)}
    with pytest.raises(ValueError, match="--attention-backend TRITON_ATTN"):
        builder(vllm, attention, layers, monkeypatch)


def test_a_layer_with_alibi_says_what_to_do(attention):
    with pytest.raises(NotImplementedError, match="--attention-backend TRITON_ATTN"):
        attention.ScalegateAttention(4, 64, 0.125, 2, alibi_slopes=[0.5])


def given(counts, lengths, table_width=4):
    starts = torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32)
    table = torch.arange(len(counts) * table_width, dtype=torch.int32).view(-1, table_width)
    lengths = torch.tensor(lengths, dtype=torch.int32)
    return SimpleNamespace(
        num_reqs=len(counts), num_actual_tokens=int(starts[-1]), query_start_loc_cpu=starts,
        seq_lens=lengths, seq_lens_cpu_upper_bound=lengths, block_table_tensor=table,
    )  # fmt: skip


def test_decoding_steps_need_nothing_of_the_host(vllm, attention, monkeypatch):
    made = builder(vllm, attention, {"0": layer(attention)}, monkeypatch)
    assert made.reorder_batch_threshold == 1, "vLLM puts decoding requests first"
    step = made.build(0, given([1, 1, 1], [5, 70, 0]))
    assert (step.num_tokens, step.num_decodes, step.prompts) == (3, 3, None)
    assert step.lengths.tolist() == [5, 70, 0]


def test_a_step_with_prompts_names_its_tiles_and_the_pages_of_their_contexts(vllm, attention, monkeypatch):
    monkeypatch.setattr(int4_pages, "WIDEN_FROM", 100)
    made = builder(vllm, attention, {"0": layer(attention)}, monkeypatch)
    step = made.build(0, given([1, 130, 3], [5, 200, 3]))
    assert (step.num_tokens, step.num_decodes) == (134, 1)
    tiles = sorted(step.prompts.tiles.tolist())
    # First token, tokens, position in the context, row: at most 128 tokens each.
    assert tiles == [[1, 128, 70, 1], [129, 2, 198, 1], [131, 3, 0, 2]]
    assert step.prompts.pages.tolist() == [4, 5, 6, 7, 8], "four pages of row 1, one of row 2"
    assert step.prompts.table[1].tolist() == [0, 1, 2, 3]
    assert step.prompts.table[2, 0] == 4


def test_the_pages_that_a_step_decodes_are_bounded_by_memory(vllm, attention, monkeypatch):
    monkeypatch.setattr(attention, "MOST_WIDENED", 2 * 4 * 64 * 2 * 64 * 2)  # keys and values, four pages
    made = builder(vllm, attention, {"0": layer(attention)}, monkeypatch)
    assert made.build(0, given([200], [256])).prompts.pages is not None
    assert made.build(0, given([200, 2], [256, 2])).prompts.pages is None


def test_vllms_measurement_of_memory_sees_what_the_largest_step_takes(attention, monkeypatch):
    sizes, empty = [], torch.empty
    query = torch.zeros(3, 4, 64)
    monkeypatch.setattr(torch, "empty", lambda *shape, **named: sizes.append(shape) or empty(1))
    out = attention.ScalegateAttention(4, 64, 0.125, 2).forward(
        None, query, None, None, torch.zeros(0), None, query + 1
    )
    assert not out.any()
    assert sizes[-1][0] >= attention.MOST_WIDENED
