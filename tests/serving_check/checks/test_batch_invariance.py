"""The gate's check of batch invariance, on real servers: one keeps bits, the other's products drift."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from scalegate.serving_check.adapters import Endpoint, SubprocessEndpoint
from scalegate.serving_check.checks.batch_invariance import check_batch_invariance
from scalegate.serving_check.evidence.company import CompanyFigures, compare_in_company
from scalegate.tests.serving_check.checks import drifting_products

pytestmark = pytest.mark.numeric

TEXT = tuple(range(5, 3000))
OPTIONS = ["--dtype", "float32", "--max-num-seqs", "12", "--max-model-len", "128"]
OPTIONS += ["--served-model-name", "pycode"]


def figures_of(endpoint: Endpoint) -> CompanyFigures:
    return compare_in_company(endpoint, "pin", TEXT, most=12, input_len=32, output_len=16)


@pytest.fixture(scope="module")
def kept(chat_checkpoint: Path, serve_command, tmp_path_factory: pytest.TempPathFactory) -> CompanyFigures:
    options = [*OPTIONS, "--batch-invariance", "pin"]
    log = tmp_path_factory.mktemp("server") / "log.txt"
    with SubprocessEndpoint(serve_command(chat_checkpoint, *options), "pycode", log=log) as endpoint:
        return figures_of(endpoint)


def test_a_server_that_keeps_bits_passes(kept: CompanyFigures):
    result = check_batch_invariance(kept)
    assert result.status == "pass", result
    assert kept.tokens > 200 and kept.neighbours == 6


def test_a_server_whose_bits_drift_fails_and_the_request_token_and_neighbours_are_named(
    chat_checkpoint: Path, tmp_path: Path
):
    options = [*OPTIONS, "--port", "0", "--device", "cpu"]
    command = [sys.executable, "-P", drifting_products.__file__, str(chat_checkpoint), *options]
    with SubprocessEndpoint(command, "pycode", log=tmp_path / "log.txt") as endpoint:
        result = check_batch_invariance(figures_of(endpoint))
    assert result.status == "fail", result
    assert "prompt tokens) next to" in result.reason and "alone and" in result.reason


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"neighbours": 0}, "larger M"),
        ({"tokens": 0}, "no answer"),
        ({"failed": 1}, "1 requests got no answer"),
    ],
)
def test_what_could_not_be_compared_decides_nothing(kept: CompanyFigures, change: dict, reason: str):
    result = check_batch_invariance(replace(kept, **change))
    assert result.status == "inconclusive" and reason in result.reason
