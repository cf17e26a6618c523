"""`pipeline validate --rival` with three real servers; that a slower artifact fails is in `test_rival.py`."""

import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner
from scalegate.base.errors import UserError
from scalegate.pipeline.cli.validate import command
from scalegate.pipeline.commands.layout import layout
from scalegate.pipeline.commands.quantize import quantize
from scalegate.pipeline.commands.validate import validate
from scalegate.pipeline.records.artifact import Artifact
from scalegate.tests.verdict_files import read_verdict
from transformers import Qwen3Config, Qwen3ForCausalLM

SLOW_LAYOUT = "cpu_int4_float32"
LOAD = [
    "--m",
    "2,4",
    "--input-len",
    "16",
    "--output-len",
    "8",
    "--quality-tokens",
    "1024",
    "--floor",
    "0.01",
    "--max-blocks",
    "60",
]


@pytest.fixture(scope="module")
def fast(example_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rivals") / "fast"
    quantize(str(example_checkpoint), "int4-hqq", out=folder, progress=False)
    return folder


@pytest.fixture(scope="module")
def slow(fast: Path) -> Path:
    """The same weights in a bad layout."""
    folder = shutil.copytree(fast, fast.with_name("slow"))
    layout(folder, force=SLOW_LAYOUT, ms=(8,), progress=False)
    return folder


def run(artifact: Path, rival: Path, report: Path):
    result = CliRunner().invoke(
        command, [str(artifact), "--rival", str(rival), "--report", str(report), *LOAD]
    )
    verdict = read_verdict(report / "serving_check.json")
    return result, verdict, next(check for check in verdict.checks if check.name == "rival")


@pytest.mark.alone
@pytest.mark.exhaustive
def test_a_faster_artifact_passes_and_all_three_are_shown(fast: Path, slow: Path, tmp_path: Path):
    result, verdict, check = run(fast, slow, tmp_path)
    assert check.status == "pass", check.reason
    assert "not counted: M=2" in check.reason
    assert verdict.rival is not None and verdict.rival.name == "slow"
    assert [point.m for point, _ in verdict.rivals] == [2, 4]
    assert "--rival slow" in verdict.command and "--rival-from-m 4" in verdict.command
    assert "rival" in result.output
    assert "Beside the rival" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_a_rival_that_cannot_be_compared_is_refused_by_name(fast: Path, tmp_path: Path):
    with pytest.raises(UserError, match=r"the rival is .* itself"):
        validate(fast, rival=fast, progress=False)
    config = Qwen3Config(
        vocab_size=64, hidden_size=128, intermediate_size=128, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, head_dim=64,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "other")
    with pytest.raises(UserError, match="is another model: vocab_size 64"):
        validate(fast, rival=tmp_path / "other", progress=False)


def test_a_recipe_that_names_a_rival_wants_it_beside_the_artifact(fast: Path, tmp_path: Path):
    copy = shutil.copytree(fast, tmp_path / "artifact")
    manifest = Artifact.read(copy)
    manifest.recipe["rival"] = "int4-hqq-g32"
    manifest.write(copy)
    with pytest.raises(UserError, match=r"rival, 'int4-hqq-g32', but there is no folder .*-int4-hqq-g32"):
        validate(copy, progress=False)
