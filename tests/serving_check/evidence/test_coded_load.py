"""Loads too short for a KV format's codes to be read and written are exploratory, and none is a default."""

import pytest
from scalegate.layouts.kv.format import KV_FORMATS
from scalegate.serving_check.evidence.coded_load import default_input_len, uncoded
from scalegate.serving_check.gate.policy import weaker_settings
from scalegate.serving_check.settings import QUALITY_TOKENS, Bounds, WorkloadSettings


def positions_that_write_a_page(workload: WorkloadSettings, page: int) -> list[int]:
    """Tokens of an answer that are stored after a full page which is not the context's first."""
    stored = range(workload.input_len, workload.input_len + workload.output_len - 1)
    return [
        tokens
        for tokens in stored
        if tokens % page == 0 and tokens >= 2 * page and tokens > workload.input_len
    ]


@pytest.mark.parametrize("name", [name for name in KV_FORMATS if name.startswith("kvarn")])
def test_the_default_load_reads_codes_from_its_first_token_and_writes_a_page(name):
    page = KV_FORMATS[name].group_size
    load = WorkloadSettings(input_len=default_input_len(name), draws_between=True)
    assert load.input_len >= 2 * page, "the first page and the one being written are no codes"
    assert positions_that_write_a_page(load, page) == [load.input_len + 32]
    assert weaker_settings(load, Bounds(), QUALITY_TOKENS, {}, name) == []


@pytest.mark.parametrize("name", ["unquantized", "fp8", "int4_per_token_head", None])
def test_formats_that_code_each_token_keep_the_short_default(name):
    assert default_input_len(name) == WorkloadSettings.input_len
    assert uncoded(WorkloadSettings(), name) is None


def test_prompts_that_are_kept_as_they_came_are_exploratory():
    load = WorkloadSettings(draws_between=True)
    (said,) = weaker_settings(load, Bounds(), QUALITY_TOKENS, {}, "kvarn_k4v2_g128")
    assert "codes none until it has been answered with 192" in said and "352" in said
    assert uncoded(WorkloadSettings(input_len=255), "kvarn_k4v2_g128") is not None


@pytest.mark.parametrize("input_len", range(256, 520))
def test_a_load_is_enough_exactly_where_an_answer_fills_a_page(input_len):
    load = WorkloadSettings(input_len=input_len, output_len=64)
    wrote = bool(positions_that_write_a_page(load, 128))
    assert (uncoded(load, "kvarn_k4v2_g128") is None) == wrote
