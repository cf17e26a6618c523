"""The release policy: what is weaker than it, what a recipe may lower, and what is then said first."""

from dataclasses import fields, replace

import pytest
from scalegate.base.errors import UserError
from scalegate.serving_check.gate.policy import (
    POLICY,
    ReleasePolicy,
    declared_by,
    first_lines,
    is_weaker,
    lowered,
    unlike_options,
    weaker,
    weaker_settings,
)
from scalegate.serving_check.settings import QUALITY_TOKENS, Bounds, WorkloadSettings
from scalegate.serving_check.statistics.decide import LOOKS

from ..gate_samples import sample_verdict

LOAD = WorkloadSettings(draws_between=True)


def test_the_defaults_are_no_weaker_than_the_policy():
    assert weaker_settings(LOAD, Bounds(), QUALITY_TOKENS, {}, None) == []
    assert POLICY.least_blocks <= LOOKS[0]
    few = replace(LOAD, ms=(1, 8, 32))
    assert weaker(sample_verdict(dict.fromkeys(few.ms, 1.0), workload=few)) == []


@pytest.mark.parametrize("ms", [(1, 8, 32, 64, 128), (1, 2, 4, 8, 16, 32), (1, 8, 64)])
def test_ms_of_a_gpu_and_of_a_laptop_are_enough(ms):
    assert weaker_settings(replace(LOAD, ms=ms), Bounds(), QUALITY_TOKENS, {}, None) == []


def test_without_ms_between_the_given_ones_a_run_is_weaker():
    """So is a verdict from before any were drawn."""
    given = replace(LOAD, draws_between=False)
    missing = "no M was drawn between the given ones"
    assert weaker_settings(given, Bounds(), QUALITY_TOKENS, {}, None) == [missing]
    assert missing in weaker(sample_verdict({1: 1.0, 8: 1.0, 32: 1.0}))
    few = replace(given, ms=(1, 8, 32))
    assert weaker_settings(few, Bounds(), QUALITY_TOKENS, {}, None) == [
        "M=8 is more than 2 times M=1, the one before it",
        "M=32 is more than 2 times M=8, the one before it",
        missing,
    ]
    dense = replace(given, ms=tuple(range(1, 33)))
    assert weaker_settings(dense, Bounds(), QUALITY_TOKENS, {}, None) == [], "there is no gap"


def test_every_bounds_name_says_in_which_direction_it_is_weaker():
    names = [field.name for kind in (Bounds, ReleasePolicy) for field in fields(kind)]
    assert [n for n in names if not n.startswith(("max_", "min_", "most_", "least_"))] == ["throughput_floor"]
    assert is_weaker("throughput_floor", 0.8, 0.93) and is_weaker("max_mean_kl", 0.2, 0.1)
    assert not is_weaker("throughput_floor", 1.0, 0.93) and not is_weaker("max_mean_kl", 0.05, 0.1)


def test_a_recipe_lowers_openly_and_a_tighter_bound_is_not_a_lower_one():
    declared = declared_by(
        {"format": "int4", "throughput_floor": 0.8, "least_largest_m": 4, "max_mean_kl": 0.05}
    )
    assert declared == {"throughput_floor": 0.8, "max_mean_kl": 0.05, "least_largest_m": 4.0}
    bounds = Bounds.from_recipe(declared)
    load = replace(LOAD, ms=(1, 4))
    assert weaker_settings(load, bounds, QUALITY_TOKENS, declared, None) == []
    assert len(weaker_settings(load, bounds, QUALITY_TOKENS, {}, None)) == 2
    assert lowered(declared) == [
        "throughput floor 0.8 (the policy says 0.93)",
        "least largest m 4 (the policy says 32)",
    ]
    with pytest.raises(UserError, match="least_largest_m"):
        declared_by({"least_largest_m": "few"})


def test_a_bound_below_what_the_recipe_declares_is_weaker_still():
    declared = {"throughput_floor": 0.8}
    bounds = Bounds(throughput_floor=0.7)
    (said,) = weaker_settings(LOAD, bounds, QUALITY_TOKENS, declared, None)
    assert said == "throughput floor 0.7, the policy wants 0.8"
    assert first_lines([said], declared) == [
        f"Exploratory, not to be published: {said}.",
        "The recipe lowers the release policy: throughput floor 0.8 (the policy says 0.93).",
    ]
    assert first_lines([], {}) == []


def unlike(ours: dict | None, theirs: dict | None, **changes) -> list[str]:
    environment = sample_verdict({1: 1.0}).environment
    return unlike_options(
        replace(environment, engine_options=ours, baseline_engine_options=theirs, **changes)
    )


def test_options_that_only_one_server_was_started_with_are_said_first():
    same = {"max_num_seqs": 32, "dtype": "bfloat16"}
    assert unlike(same, dict(same)) == []
    assert unlike({**same, "layout": "tiles", "kv_cache_dtype": "fp8"}, same) == [], "an artifact's own"
    other = unlike(same, {**same, "max_num_seqs": 8})
    assert first_lines([], {}, unlike=other) == [
        "The servers were started with different options: max num seqs 32 (the baseline's: 8)."
    ]
    words = {**same, "engine_args": "--enforce-eager"}
    assert unlike(words, words) == []
    both = {**words, "baseline_engine_args": ""}
    assert unlike(both, both) == ["engine args --enforce-eager (the baseline's: )"]
    assert unlike(same, None) == []
    assert unlike(same, {}, baseline_engine="vllm") == [], "the policy says that the engines differ"


def test_a_baseline_that_is_stored_below_16_bits_is_said_first():
    assert first_lines([], {}, stored_as="FP8, one scale") == [
        "The baseline is stored as FP8, one scale; it was compared as the 16-bit weights in it."
    ]
