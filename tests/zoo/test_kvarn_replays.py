"""KVarN's failure in serving, replayed on real servers: each cause fails `validate` for its own reason.

The negative control, the sound format through the same gate, is `pipeline/publishing/test_release_kv.py`.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from scalegate.tests.forked_command import run_pipeline

from .kvarn_replays import COMPILED, FLUSHED_IN_PYTHON, SIDE_POOL

pytestmark = pytest.mark.long

M = 4
INPUT_LEN, OUTPUT_LEN = 112, 32
"""Every answer fills a page of 64 tokens, the request's second one."""
PLUGIN = Path(__file__).with_name("kvarn_replays.py")
REASONS = {
    FLUSHED_IN_PYTHON: {"throughput": "of the extra time is spent writing full pages"},
    SIDE_POOL: {
        "M reached": "something else caps the running requests: a limit, or a side pool",
        "KV capacity": "the KV cache has room for 7 such requests, yet",
    },
    COMPILED: {"compilations in traffic": "_sinkhorn_log_kernel"},
}
"""What each replay fails, and words of the reason."""
FLOORS, MOST_BLOCKS = {FLUSHED_IN_PYTHON: 0.93}, {FLUSHED_IN_PYTHON: 20}
"""Where speed is what fails. A few blocks say so, as of the others; a busy machine may need some more."""
MOST_VERDICTS = 3
"""How often a busy machine is asked, as `validate` advises where it could not decide."""
NAMED = {name for reasons in REASONS.values() for name in reasons}


def failed(checkpoint: Path, kv_format: str) -> dict[str, str]:
    """The reasons of the checks that `pipeline validate` fails, once it has decided what was asked."""
    for _ in range(MOST_VERDICTS):
        checks = judged(checkpoint, kv_format)
        asked = [check for check in checks if check["name"].endswith(tuple(REASONS[kv_format]))]
        if any(check["status"] == "fail" for check in asked) or all(
            check["status"] == "pass" for check in asked
        ):
            break
    return {check["name"]: check["reason"] for check in checks if check["status"] == "fail"}


def judged(checkpoint: Path, kv_format: str) -> list[dict[str, Any]]:
    """The checks of one verdict."""
    words = ["validate", checkpoint, "--baseline", checkpoint, "--kv-cache-dtype", kv_format, "--m", M]
    words += ["--input-len", INPUT_LEN, "--output-len", OUTPUT_LEN, "--quality-tokens", 1024]
    words += ["--floor", FLOORS.get(kv_format, 0.4), "--device", "cpu", "--json"]
    words += ["--max-blocks", MOST_BLOCKS.get(kv_format, 6)]
    result = run_pipeline(*words, environment={**os.environ, "SCALEGATE_PLUGINS": str(PLUGIN)})
    assert result.stdout, result.stderr
    verdict = json.loads(result.stdout)
    assert verdict["artifact"]["kv_cache_dtype"] == kv_format
    assert verdict["environment"]["engine_options"]["kv_cache_dtype"] == kv_format
    assert verdict["baseline"]["kv_cache_dtype"] == "unquantized"
    quality = next(check for check in verdict["checks"] if check["name"] == "quality")
    assert quality["figures"]["mean_kl"] > 1e-4, "nothing was coded"
    return verdict["checks"]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "kv_format",
    [pytest.param(FLUSHED_IN_PYTHON, marks=pytest.mark.alone), SIDE_POOL, COMPILED],
)
def test_each_cause_fails_for_its_own_reason(example_checkpoint: Path, kv_format: str):
    caught = failed(example_checkpoint, kv_format)
    for name, words in REASONS[kv_format].items():
        # Of whole requests, or of decoding by itself.
        told = [reason for check, reason in caught.items() if check.endswith(name)]
        assert any(words in reason for reason in told), caught
    others = NAMED - REASONS[kv_format].keys() - {"throughput"}
    assert not others & caught.keys(), caught
