"""A release of keys and values alone through the real gate: the control of `zoo/test_kvarn_replays.py`."""

from pathlib import Path

import pytest
from scalegate.pipeline.commands.inspect import inspect
from scalegate.pipeline.commands.release import release

pytestmark = pytest.mark.long

# Pages of 64 tokens, so that some are coded; how fast a busy machine reads them is not what is tested.
RECIPE = """
format: unquantized
kv_cache: kvarn_k4v2_g64
throughput_floor: 0.2
max_tpot_ratio: 10
max_ttft_ratio: 10
max_itl_ratio: 10
least_largest_m: 4
least_output_len: 32
least_quality_tokens: 1000
"""
LOAD = {"m": (1, 4), "input_len": 176, "output_len": 32, "quality_tokens": 2048, "max_blocks": 6}


@pytest.mark.exhaustive
def test_it_is_served_so_and_judged(example_checkpoint: Path, tmp_path: Path):
    """Nothing fails; a machine that has other things to do may leave it undecided."""
    recipe = tmp_path / "kvarn-small.yaml"
    recipe.write_text(RECIPE, encoding="utf-8")
    published = tmp_path / "release"
    result = release(
        example_checkpoint, recipe, f"folder:{published}", work=tmp_path / "work", device="cpu",
        progress=False, **LOAD,
    )  # fmt: skip
    verdict = result.verdict
    assert verdict is not None
    failed = {check.name: check.reason for check in verdict.checks if check.status == "fail"}
    assert not failed and verdict.status in ("pass", "inconclusive")
    assert (verdict.status == "pass") == (result.push is not None) == published.exists()
    assert (verdict.artifact.kv_cache_dtype, verdict.baseline.kv_cache_dtype) == (
        "kvarn_k4v2_g64",
        "unquantized",
    )
    assert verdict.quality_tokens == 1024 and verdict.evidence.quality.mean_kl > 1e-4, "nothing was coded"
    shown = inspect(result.artifact)
    assert shown.verdict_problem is None and shown.kv_cache == "kvarn_k4v2_g64"
