"""A recipe's `batch_invariance: pin`: proved on the served artifact, and said with its cost."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from scalegate.base.errors import UserError
from scalegate.pipeline.commands.quantize import quantize
from scalegate.pipeline.commands.release import release
from scalegate.pipeline.commands.validate import validate
from scalegate.pipeline.publishing.card import write_card
from scalegate.pipeline.publishing.examination import examine
from scalegate.pipeline.records.artifact import VERDICT_NAME, Artifact
from scalegate.serving_check.evidence.verdict import Verdict
from scalegate.serving_check.gate.record import contradictions, parse_verdict
from scalegate.tests.verdict_files import read_verdict

RECIPE = "format: int4\nbatch_invariance: pin\n"

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def claimed(example_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Verdict]:
    folder = tmp_path_factory.mktemp("claimed")
    recipe = folder / "int4-pin.yaml"
    recipe.write_text(RECIPE, encoding="utf-8")
    artifact = folder / "artifact"
    quantize(str(example_checkpoint), recipe, out=artifact, progress=False)
    verdict = validate(
        artifact, m=(2,), floor=0.01, input_len=16, output_len=8, quality_tokens=1024, progress=False
    )
    return artifact, verdict


@pytest.mark.exhaustive
def test_the_claim_is_proved_on_the_served_artifact(claimed: tuple[Path, Verdict]):
    artifact, verdict = claimed
    checks = {check.name: check for check in verdict.checks}
    assert checks["batch invariance"].status == "pass", checks["batch invariance"]
    assert checks["loads"].status == "pass", checks["loads"]
    assert set(verdict.artifact.layouts) == {"cpu_int4_fixed_rows"}
    ours, theirs = verdict.environment.engine_options, verdict.environment.baseline_engine_options
    assert ours["batch_invariance"] == "pin" and theirs["batch_invariance"] == "tuned"
    assert "--batch-invariance pin" in verdict.command
    card = write_card(artifact, Artifact.read(artifact), verdict, "artifact", "someone/artifact")
    assert "`--batch-invariance pin`" in card and "the ratios include its cost" in card


def drop_the_figures(value: dict) -> None:
    value["evidence"]["company"] = None
    value["checks"] = [check for check in value["checks"] if check["name"] != "batch invariance"]


def claim_more(value: dict) -> None:
    value["environment"]["engine_options"]["batch_invariance"] = "per-token"


def claim_it_of_a_tuned_server(value: dict) -> None:
    value["environment"]["engine_options"]["batch_invariance"] = "tuned"


@pytest.mark.exhaustive
@pytest.mark.parametrize("edit", [drop_the_figures, claim_more, claim_it_of_a_tuned_server])
def test_a_claim_without_figures_of_its_own_is_refused(
    claimed: tuple[Path, Verdict], edit: Callable[[dict], None], tmp_path: Path
):
    path = tmp_path / VERDICT_NAME
    value = claimed[1].to_json()
    path.write_text(json.dumps(value), encoding="utf-8")
    assert read_verdict(path) == claimed[1]
    edit(value)
    path.write_text(json.dumps(value), encoding="utf-8")
    assert any(
        "its server claims to be" in line and "its figures are of one that claims" in line
        for line in contradictions(parse_verdict(path))
    )


@pytest.mark.exhaustive
def test_a_verdict_on_a_tuned_server_does_not_bear_out_the_recipe(claimed: tuple[Path, Verdict]):
    artifact, _ = claimed
    assert not examine(artifact, Artifact.read(artifact)).broken
    manifest = Artifact.read(artifact)
    manifest.recipe["batch_invariance"] = "per-token"
    manifest.write(artifact)
    broken = {finding.name: finding.said for finding in examine(artifact, Artifact.read(artifact)).broken}
    assert "on a server that was 'pin'" in broken["invariance"]


def test_a_release_is_served_as_its_recipe_says(tmp_path: Path):
    recipe = tmp_path / "int4-pin.yaml"
    recipe.write_text(RECIPE, encoding="utf-8")
    with pytest.raises(UserError, match="write `batch_invariance: per-token` in the recipe"):
        release("model", recipe, "folder:out", work=tmp_path, batch_invariance="per-token", progress=False)
