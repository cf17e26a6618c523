"""Long prompts are practical to validate on: M is reached, fewer Ms are measured, the text is long enough."""

import importlib
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from scalegate.base.errors import UserError
from scalegate.pipeline.checkpoints.checkpoint import open_checkpoint
from scalegate.pipeline.commands.validate import prepare, validate
from scalegate.pipeline.validation.held_out import read_held_out, window_for
from scalegate.pipeline.validation.servers import (
    LONG_PROMPT_IN_USE,
    sized_options,
    with_long_contexts,
    with_recorded_contexts,
)
from scalegate.pipeline.validation.serving import _gate_run
from scalegate.serving_check.gate.policy import weaker_settings
from scalegate.serving_check.profiles import PROFILES
from scalegate.serving_check.settings import QUALITY_TOKENS, Bounds, WorkloadSettings, default_ms
from scalegate.serving_check.workload.prompts import prompts
from scalegate.serving_check.workload.spec import WorkloadSpec
from scalegate.tests.pipeline.quantization.tiny_families import make_text

validate_module = importlib.import_module("scalegate.pipeline.commands.validate")


def chunks(input_len: int, output_len: int, device: str, **given) -> tuple[int, int]:
    workload = WorkloadSettings((1, 32), input_len, output_len)
    return sized_options({"device": device, **given}, workload).chunks(device == "cuda")


def test_prompts_are_read_in_a_part_of_the_time_that_an_answer_takes():
    assert chunks(64, 64, "cpu") == (2048, 512) and chunks(1024, 64, "cuda") == (8192, 256), "as it is served"
    assert chunks(2048, 256, "cuda") == (8192, 1024)
    assert chunks(4096, 128, "cpu") == (4096, 4096)
    assert chunks(4096, 64, "cuda") == (8192, 8192)


def test_answers_too_short_for_m_are_refused_with_the_length_that_would_do():
    with pytest.raises(UserError, match=r"M would not be reached\. Give --output-len 128,") as refused:
        chunks(16384, 64, "cuda")
    assert "64 steps" in refused.value.message
    assert chunks(16384, 128, "cuda") == (8192, 8192)
    with pytest.raises(UserError, match="Give --output-len 2048"):
        chunks(16384, 128, "cuda", prefill_chunk=512)


def test_the_length_that_would_do_is_one_that_the_model_takes():
    load = WorkloadSettings((1, 32), 4096, 8)
    with pytest.raises(UserError, match="Give --output-len 32, or fewer"):
        sized_options({"device": "cpu"}, load, context=8192)
    for given, context in (({}, 4120), ({"max_model_len": 4120}, 8192)):
        with pytest.raises(UserError, match=r"Give shorter prompts \(--input-len\), or fewer"):
            sized_options({"device": "cpu", **given}, load, context=context)


def test_requests_that_fill_the_context_are_served_within_it():
    load = WorkloadSettings((1,), 8128, 64)
    assert sized_options({"device": "cpu"}, load, context=8192).max_model_len == 8192
    assert sized_options({"device": "cpu"}, load, longest_task=9000, context=16384).max_model_len == 9000


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"input_len": 4096, "max_model_len": 2048}, "--max-model-len 2048 is too short for requests"),
        ({"max_model_len": 127}, r"64 \+ 64 tokens \(at least 128\)"),
        ({"input_len": 9000}, "do not fit the 8192 tokens"),
        ({"input_len": 8150, "output_len": 80, "m": (1, 2)}, "do not fit the 8192 tokens"),
    ],
)
def test_lengths_that_cannot_be_served_are_refused_before_anything_starts(
    example_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, options: dict, said: str
):
    monkeypatch.setattr(validate_module, "measure_and_judge", lambda run: pytest.fail("it began"))
    with pytest.raises(UserError, match=said) as refused:
        validate(example_checkpoint, example_checkpoint, device="cpu", progress=False, **options)
    assert "\n" not in refused.value.message


def test_fewer_ms_are_measured_and_the_policy_agrees():
    assert default_ms(64) == (1, 2, 4, 8, 16, 32) and default_ms(4096) == (1, 8, 32)
    long = WorkloadSettings(default_ms(4096), 4096, 128, draws_between=True)
    assert weaker_settings(long, Bounds(), QUALITY_TOKENS, {}, None) == []


def test_prompts_longer_than_the_text_are_all_different(example_checkpoint: Path, heldout_text: Path):
    checkpoint = open_checkpoint(example_checkpoint)
    assert window_for(checkpoint, checkpoint, "unquantized", 4096) == 512
    window = window_for(checkpoint, checkpoint, "fp8", 4096)
    text = read_held_out(heldout_text, checkpoint, checkpoint, 4096, window, prompt=100_000)
    assert [len(window) for window in text.windows] == [2048, 2048]
    spec = WorkloadSpec(1, 1, 100_000, 1, seed=0, token_pool=tuple(text.token_ids))
    taken = prompts(spec)
    first = [tuple(next(taken)[:64]) for _ in range(20)]
    assert len(set(first)) == len(first)


@pytest.mark.parametrize(("family", "window"), [("jamba", 2048), ("llama", 512)])
def test_windows_are_long_where_a_state_takes_up_the_errors_of_all_tokens(
    family: str, window: int, tmp_path: Path
):
    hybrid = open_checkpoint(make_text(tmp_path, family, max_position_embeddings=4096))
    assert window_for(hybrid, hybrid, "unquantized", 4096) == window


@pytest.mark.parametrize(
    ("rope", "tokens", "window"),
    [
        ({"original_max_position_embeddings": 512}, 4096, 1024),
        ({"original_max_position_embeddings": 512}, 800, 512),
        ({"original_max_position_embeddings": 32_768}, 4096, 512),
        ({"original_max_position_embeddings": 7_900}, 16_384, 8192),
    ],
)
def test_windows_reach_beyond_where_a_config_changes_anything(
    example_checkpoint: Path, rope: dict[str, int], tokens: int, window: int
):
    """Within what is measured, and within the context of 8,192 tokens."""
    checkpoint = open_checkpoint(example_checkpoint)
    changed = replace(checkpoint, config=checkpoint.config | {"rope_scaling": rope})
    assert window_for(changed, checkpoint, "unquantized", tokens) == window
    assert window_for(checkpoint, changed, "unquantized", tokens) == window


def test_servers_hold_the_longest_request_of_a_load_as_in_use_unless_sizes_are_given():
    load = WorkloadSettings()
    usual = sized_options({"device": "cpu"}, load)
    long = with_long_contexts(usual, {})
    assert long.max_model_len > LONG_PROMPT_IN_USE
    assert long.kv_cache_tokens == usual.kv_cache_tokens + long.max_model_len
    assert with_long_contexts(usual, {}, context=2048).max_model_len == 2048
    assert with_long_contexts(usual, {"max_model_len": 256}) == usual
    assert with_recorded_contexts(usual, {}, long.to_json()) == long
    assert with_recorded_contexts(usual, {}, usual.to_json()) == usual


def test_servers_have_room_for_the_longest_requests_of_a_profile():
    usual = sized_options({}, WorkloadSettings())
    plain, code = with_long_contexts(usual, {}), with_long_contexts(usual, {}, profile="code")
    assert code.max_model_len >= PROFILES["code"].longest_request > plain.max_model_len
    assert code.kv_cache_tokens - usual.kv_cache_tokens >= 4 * PROFILES["code"].longest_request
    assert with_long_contexts(usual, {}, context=2048, profile="code").max_model_len == 2048
    assert with_recorded_contexts(usual, {}, code.to_json(), "code") == code


def test_an_exploratory_run_sends_a_load_as_in_use_where_it_asks_for_a_profile(example_checkpoint: Path):
    """Servers then have room for it. Without a profile, such a run sends none."""
    given = {"baseline": str(example_checkpoint), "m": (1, 2), "device": "cpu"}
    text = Mock(token_ids=[1, 2, 3])
    without, asked = (
        prepare(str(example_checkpoint), given | more, None, progress=False)
        for more in ({}, {"profile": "code"})
    )
    assert _gate_run(without, text).source is None
    assert _gate_run(asked, text).source is not None
    longest = PROFILES["code"].longest_request
    assert without.options.max_model_len < longest <= asked.options.max_model_len
