"""`pipeline validate --batch-invariance pin`: the verdict says what was claimed, proved and at what speed."""

from pathlib import Path

import pytest
from scalegate.pipeline.quantize import quantize
from scalegate.pipeline.validate import validate

pytestmark = pytest.mark.long


def test_the_claim_is_proved_on_the_served_artifact(example_checkpoint: Path, tmp_path: Path):
    artifact = tmp_path / "artifact"
    quantize(str(example_checkpoint), "int4-hqq", out=artifact, progress=False)
    verdict = validate(
        artifact,
        m=(2,),
        floor=0.01,
        input_len=16,
        output_len=8,
        quality_tokens=1024,
        batch_invariance="pin",
        progress=False,
    )
    checks = {check.name: check for check in verdict.checks}
    assert checks["batch invariance"].status == "pass", checks["batch invariance"]
    assert checks["loads"].status == "pass", checks["loads"]
    assert set(verdict.artifact.layouts) == {"cpu_int4_fixed_rows"}
    ours, theirs = verdict.environment.engine_options, verdict.environment.baseline_engine_options
    assert ours["batch_invariance"] == "pin" and theirs["batch_invariance"] == "tuned"
    assert "--batch-invariance pin" in verdict.command
