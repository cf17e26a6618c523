"""A small artifact with a passing verdict, for tests of what happens to one after the gate. Not loadable."""

import json
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from scalegate.layouts.files import write_json
from scalegate.pipeline.artifact import VERDICT_NAME, Artifact, record_files, sha256_of
from scalegate.serving_check.settings import Bounds, WorkloadSettings
from scalegate.serving_check.verdict import (
    CheckResult,
    CurvePoint,
    Environment,
    ServingFigures,
    Subject,
    Verdict,
)

SHARDS = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
INT4 = {"label": "INT4 g128, zero points", "modules": 28, "spec": {"format": "int4", "group_size": 128}}
PLOT = b"\x89PNG\r\n\x1a\n" + b"plot" * 64


def make_artifact(folder: Path, seed: int = 0, shards: list[str] = SHARDS, **changes: Any) -> Path:
    """An artifact in `folder` that has passed; `changes` replace fields of its verdict."""
    random = Random(seed)
    folder.mkdir(parents=True)
    for name in shards:
        (folder / name).write_bytes(random.randbytes(300_000))
    write_json(folder / "config.json", {"quantization_config": {"quant_method": "compressed-tensors"}})
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    (folder / "serving_check").mkdir()
    for plot in ("throughput", "ratio"):
        (folder / "serving_check" / f"{plot}.png").write_bytes(PLOT + plot.encode())
    artifact = Artifact(
        source="maker/base",
        source_revision="0123456789abcdef0123456789abcdef01234567",
        recipe={"name": "int4-hqq", "format": "int4", "group_size": 128},
        versions={"scalegate": "0.1.0", "torch": "2.13.0"},
        files=record_files(folder),
        quantization={"formats": [INT4]},
        base_metadata={"license": "apache-2.0", "language": ["en", "no"], "tags": ["code"]},
    )
    give_verdict(folder, artifact, replace(passing_verdict(artifact), **changes))
    return folder


def give_verdict(folder: Path, artifact: Artifact, verdict: Verdict) -> None:
    """What `pipeline validate` leaves: the verdict, and its digest in the manifest."""
    verdict.write(folder / VERDICT_NAME)
    artifact.verdict_sha256 = sha256_of(folder / VERDICT_NAME)
    artifact.write(folder)


def passing_verdict(artifact: Artifact) -> Verdict:
    base = Subject("maker/base", artifact.source_revision, "0" * 64, None, "none", {})
    checks = (
        CheckResult("throughput", "pass", "1.02 at M=4", ">= 0.93", "every M is decided"),
        CheckResult("quality", "pass", "0.012 nats", "<= 0.1 nats", "close to the baseline"),
    )
    return Verdict(
        status="pass",
        artifact=Subject(
            "artifact", None, artifact.bytes_digest(), None, "compressed-tensors INT4 g128", {"cpu_int4": 28}
        ),
        baseline=base,
        checks=checks,
        curve=(curve_point(1, 100.0, 96.0), curve_point(4, 390.0, 370.0)),
        environment=Environment(
            "Some CPU x2", "embedded", "embedded", "bfloat16", {"torch": "2.13.0"}, "Linux", 2
        ),
        workload=WorkloadSettings(ms=(1, 4)),
        bounds=Bounds(),
        quality_tokens=1234,
        quality_text_sha256="0" * 64,
        command="pipeline validate artifact",
        created="2026-01-01T00:00:00Z",
        duration_seconds=12.0,
    )


def curve_point(m: int, artifact: float, baseline: float) -> CurvePoint:
    ratio = artifact / baseline
    return CurvePoint(
        m, figures(artifact), figures(baseline), ratio, ratio * 0.98, ratio * 1.02, "pass", (0.01, 0.02)
    )


def figures(throughput: float) -> ServingFigures:
    return ServingFigures(
        throughput, (throughput,), 12.0, 20.0, 9.5, 11.0, 1.0, 0.0, 0.1, 0, requests=8, failed_requests=0
    )


def edit_json(path: Path, **changes: Any) -> None:
    value = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(value | changes), encoding="utf-8")
