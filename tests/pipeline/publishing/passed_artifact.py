"""A small artifact with a passing verdict, for tests of what happens to one after the gate. Not loadable."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from scalegate.base.atomic_files import write_json
from scalegate.pipeline.records.artifact import VERDICT_NAME, Artifact, record_files
from scalegate.pipeline.records.file_digests import sha256_of
from scalegate.serving_check.evidence.verdict import CurvePoint, ServingFigures, Verdict
from scalegate.serving_check.gate.policy import declared_by
from scalegate.serving_check.settings import Bounds, WorkloadSettings
from scalegate.tests.serving_check.gate_samples import sample_verdict

SHARDS = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
INT4 = {"label": "INT4 g128, zero points", "modules": 28, "spec": {"format": "int4", "group_size": 128}}
PLOT = b"\x89PNG\r\n\x1a\n" + b"plot" * 64
PLOTS = {f"{name}.png": PLOT + name.encode() for name in ("throughput", "ratio")}
RATIOS = {1: 1.04, 4: 1.05, 32: 1.02}
WORKLOAD = WorkloadSettings(tuple(RATIOS), draws_between=True)
SOURCE_SHA256 = "5" * 64


def make_artifact(folder: Path, seed: int = 0, shards: list[str] = SHARDS, **changes: Any) -> Path:
    """An artifact in `folder` that has passed; `changes` replace fields of its verdict."""
    random = Random(seed)
    folder.mkdir(parents=True)
    for name in shards:
        (folder / name).write_bytes(random.randbytes(300_000))
    write_json(folder / "config.json", {"quantization_config": {"quant_method": "compressed-tensors"}})
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    (folder / "serving_check").mkdir()
    for name, content in PLOTS.items():
        (folder / "serving_check" / name).write_bytes(content)
    artifact = Artifact(
        source="maker/base",
        source_revision="0123456789abcdef0123456789abcdef01234567",
        recipe={"name": "int4-hqq", "format": "int4", "group_size": 128},
        versions={"scalegate": "0.1.0", "torch": "2.13.0"},
        files=record_files(folder),
        quantization={"formats": [INT4]},
        base_metadata={"license": "apache-2.0", "language": ["en", "no"], "tags": ["code"]},
        source_sha256=SOURCE_SHA256,
    )
    give_verdict(folder, artifact, passing_verdict(artifact, **changes))
    return folder


def give_verdict(folder: Path, artifact: Artifact, verdict: Verdict) -> None:
    """What `pipeline validate` leaves: the verdict, and its digest in the manifest."""
    verdict.write(folder / VERDICT_NAME)
    artifact.verdict_sha256 = sha256_of(folder / VERDICT_NAME)
    artifact.write(folder)


def passing_verdict(artifact: Artifact, **changes: Any) -> Verdict:
    """What the gate gives on a sound `artifact`; `changes` replace fields, and the checks follow them."""
    sample = sample_verdict(RATIOS, workload=WORKLOAD)
    subject = replace(
        sample.artifact,
        name="artifact",
        bytes_digest=artifact.bytes_digest(),
        layout_plan_sha256=artifact.layout_plan_sha256(),
        made_from_sha256=artifact.source_sha256,
        manifest_sha256=artifact.sha256(),
    )
    base = replace(
        sample.baseline, name=artifact.source, revision=artifact.source_revision, weights_sha256=SOURCE_SHA256
    )
    bound = {
        "artifact": subject,
        "baseline": base,
        "declared": declared_by(artifact.recipe),
        "bounds": Bounds.from_recipe(artifact.recipe),
        "report": {name: hashlib.sha256(content).hexdigest() for name, content in PLOTS.items()},
        "command": "pipeline validate artifact",
        "workload": WORKLOAD,
    }
    return sample_verdict(RATIOS, **(bound | changes))


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
