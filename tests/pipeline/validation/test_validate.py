"""`pipeline validate` with real servers: a pass, a fail that names the layer, what it writes and refuses."""

import importlib
import json
import re
import shutil
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from scalegate.base.errors import UserError
from scalegate.pipeline.checkpoints.baseline import weights_digest
from scalegate.pipeline.checkpoints.checkpoint import open_checkpoint
from scalegate.pipeline.cli.validate import command
from scalegate.pipeline.commands.layout import layout
from scalegate.pipeline.commands.quantize import quantize
from scalegate.pipeline.commands.validate import validate
from scalegate.pipeline.records.artifact import SOURCE_NAME, Artifact
from scalegate.pipeline.records.file_digests import sha256_of
from scalegate.pipeline.records.signature import check_signature
from scalegate.serving_check.adapters import SubprocessEndpoint
from scalegate.serving_check.checks.part_throughput import DECODING, PROMPTS
from scalegate.serving_check.checks.throughput import NAME as THROUGHPUT
from scalegate.serving_check.engine.options import EngineOptions
from scalegate.serving_check.evidence.verdict import Verdict
from scalegate.tests.verdict_files import read_verdict

pytestmark = pytest.mark.long

SLOW_LAYOUT = "cpu_int4_float32"
SMALL_LOAD = ["--input-len", "16", "--output-len", "16", "--quality-tokens", "1024"]
SMALL = {"input_len": 16, "output_len": 16, "quality_tokens": 1024, "progress": False}
# A busy machine cannot settle 7% in a test's time; that is the bench's affair. Here the floor is far away.
FAR_FLOOR = 0.2
NO_NEW_SERVERS = 60
"""Too few blocks for servers to be started anew for groups of them, which takes minutes on a busy machine."""
FEW_BLOCKS = 12
"""Enough on a quiet machine. With any number, a busy machine may leave a speed undecided."""


@pytest.fixture(scope="module")
def artifact(example_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In the layouts that are fast on this CPU, whatever its instructions."""
    folder = tmp_path_factory.mktemp("validate") / "artifact"
    quantize(str(example_checkpoint), "int4-hqq", out=folder, progress=False)
    layout(folder, ms=(1, 4), progress=False)
    return folder


def test_the_artifact_itself_is_no_baseline_nor_is_a_copy_of_it(artifact: Path, tmp_path: Path):
    copy = shutil.copytree(artifact, tmp_path / "copy")
    for baseline in (artifact, copy):
        with pytest.raises(UserError, match="itself, or a copy of it"):
            validate(artifact, baseline, **SMALL)


def test_a_baseline_that_has_moved_is_asked_for(example_checkpoint: Path, artifact: Path, tmp_path: Path):
    copy = shutil.copytree(artifact, tmp_path / "copy")
    (copy / SOURCE_NAME).write_text(str(tmp_path / "gone"))
    with pytest.raises(UserError, match=f"was made from .*{example_checkpoint.name}, which cannot be opened"):
        validate(copy, **SMALL)


def test_the_manifest_knows_its_source_by_digest(example_checkpoint: Path, artifact: Path):
    source = open_checkpoint(str(example_checkpoint))
    assert Artifact.read(artifact).source_sha256 == weights_digest(source, {})
    assert weights_digest(open_checkpoint(str(artifact)), {}) != weights_digest(source, {})


@pytest.fixture(scope="module")
def passed(artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Verdict:
    key = tmp_path_factory.mktemp("keys") / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    # So long answers that prompts take little of the time: by themselves they are too short to be decided.
    longer = SMALL | {"output_len": 48}
    return validate(artifact, m=(1, 4), floor=FAR_FLOOR, max_blocks=FEW_BLOCKS, sign=key, **longer)


def test_the_verdict_is_signed_where_a_key_is_given(passed: Verdict, artifact: Path):
    assert check_signature(artifact / "serving_check.json").state == "good"


def test_a_good_artifact_passes_every_check(passed: Verdict):
    # A busy machine says what prompts and decoding take of the time, and may leave a speed undecided.
    parts = [DECODING, PROMPTS]
    other = {check.name: check.status for check in passed.checks if check.status != "pass"}
    assert other.keys() <= {THROUGHPUT, *parts} and "fail" not in other.values(), other
    assert [check.name for check in passed.checks if check.name not in parts] == [
        "loads", "weights", "tokenizer and templates", "other readers",
        "canary text", "quality", "served text", "no failed requests", "tokens received",
        "M reached", "throughput", "plausible speed", "streamed", "latency", "stalls", "KV capacity",
        "compilations in traffic",
    ]  # fmt: skip
    assert [point.m for point in passed.curve] == [1, 4]
    assert passed.curve[1].artifact.running_mean == pytest.approx(4, abs=1)


def test_what_is_weaker_than_the_policy_is_marked_and_says_so(passed: Verdict):
    assert "the largest M is 4, the policy wants 32" in passed.exploratory
    assert f"throughput floor {FAR_FLOOR}, the policy wants 0.93" in passed.exploratory
    assert not any("baseline" in line for line in passed.exploratory), "it is the right one, by digest"


def test_the_verdict_is_bound_to_the_bytes_and_the_manifest_to_the_verdict(passed: Verdict, artifact: Path):
    manifest = Artifact.read(artifact)
    assert passed.artifact.bytes_digest == manifest.bytes_digest()
    assert manifest.changed_files(artifact) == []
    assert manifest.verdict_sha256 == sha256_of(artifact / "serving_check.json")
    assert read_verdict(artifact / "serving_check.json") == passed
    report = artifact / "serving_check"
    assert passed.report == {path.name: sha256_of(path) for path in report.iterdir()}
    assert (report / "report.html").is_file()


def test_what_both_servers_were_started_with_is_recorded(passed: Verdict):
    ours, theirs = passed.environment.engine_options, passed.environment.baseline_engine_options
    assert ours is not None and theirs is not None
    assert set(ours) == set(theirs) == {field.name for field in fields(EngineOptions)}
    assert ours["kv_cache_dtype"] == "unquantized" and ours["device"] != "auto" != ours["dtype"]
    assert ours["max_num_seqs"] == 4 and ours["prefill_chunk"] is not None


def test_the_recorded_command_is_one_that_the_command_line_takes(passed: Verdict):
    words = passed.command.split()
    assert words[:2] == ["pipeline", "validate"]
    command.make_context("validate", words[2:])


def test_no_folder_of_this_machine_stands_in_what_is_published(
    passed: Verdict, artifact: Path, example_checkpoint: Path
):
    written = [artifact / "serving_check.json", *(artifact / "serving_check").iterdir()]
    assert len(written) > 2
    for path in written:
        for folder in (artifact.parent, example_checkpoint.parent):
            assert str(folder).encode() not in path.read_bytes(), path.name
    assert passed.baseline.name == example_checkpoint.name


@pytest.fixture(scope="module")
def failed(artifact: Path, passed: Verdict, tmp_path_factory: pytest.TempPathFactory):
    """The command line on a copy of what passed, its layers forced into a layout that is really bad."""
    report = tmp_path_factory.mktemp("failed")
    copy = shutil.copytree(artifact, report / "artifact")
    layout(copy, force=SLOW_LAYOUT, ms=(8,), progress=False)
    result = CliRunner().invoke(command, [str(copy), "--m", "8", "--report", str(report), *SMALL_LOAD])
    return result, report


@pytest.mark.exhaustive
@pytest.mark.alone
def test_a_bad_layout_fails_by_shape_kernel_m_and_the_layout_that_would_have_passed(failed):
    result, report = failed
    assert result.exit_code == 1, result.output
    verdict = read_verdict(report / "serving_check.json")
    reason = next(check.reason for check in verdict.checks if check.name == "throughput")
    assert "at M=8" in reason
    assert "int4 g128 zp" in reason
    assert "_weight_int4pack_mm_for_cpu" in reason
    assert SLOW_LAYOUT in reason
    # Whether another one reaches the floor on this CPU, measurements say.
    assert re.search(r"Layout \w+ would have passed|least slow is \w+", reason)
    assert verdict.artifact.layouts == {SLOW_LAYOUT: 16}, "4 layers: merged QKV and gate/up, output and down"


@pytest.mark.exhaustive
@pytest.mark.alone
def test_a_fail_is_shown_in_the_terminal_and_replaces_the_earlier_pass(failed):
    result, report = failed
    verdict = report / "artifact" / "serving_check.json"
    assert "FAIL  throughput" in result.output
    assert read_verdict(verdict).status == "fail"
    assert check_signature(verdict).state == "unsigned", "it was of the other verdict"


@pytest.mark.exhaustive
def test_a_server_that_packs_otherwise_than_was_judged_fails(artifact: Path, tmp_path: Path, monkeypatch):
    module = importlib.import_module("scalegate.pipeline.validation.serving")
    as_asked = module.server_of

    def packs_otherwise(job):
        other = replace(job.options, layout="dequantize") if job.side == "artifact" else job.options
        return as_asked(replace(job, options=other))

    monkeypatch.setattr(module, "server_of", packs_otherwise)
    copy = shutil.copytree(artifact, tmp_path / "artifact")
    verdict = validate(copy, m=(1,), floor=0.001, max_blocks=6, **SMALL)
    loads = next(check for check in verdict.checks if check.name == "loads")
    assert (verdict.status, loads.status) == ("fail", "fail")
    assert "in dequantize 256x256" in loads.reason and "in cpu_int4" in loads.reason


def test_an_artifact_whose_bytes_changed_is_refused(artifact: Path, passed: Verdict, tmp_path: Path):
    config = artifact / "config.json"
    original = config.read_bytes()
    try:
        config.write_bytes(original + b" ")
        with pytest.raises(UserError, match=r"config\.json"):
            validate(artifact, **SMALL)
    finally:
        config.write_bytes(original)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engine": "nosuch"}, "unknown engine"),
        ({"dtype": "int3"}, "unknown dtype"),
        ({"m": (0,)}, "m is .* at least 1"),
        ({"input_len": 9000, "m": (1,)}, "context"),
        ({"text": "nowhere.txt"}, "held-out text"),
        ({"engine": "http://127.0.0.1:9"}, "no server answers"),
    ],
)
def test_what_cannot_be_used_is_refused_with_one_message(example_checkpoint: Path, options, message):
    with pytest.raises(UserError, match=message):
        validate(example_checkpoint, example_checkpoint, **{**SMALL, **options})


def test_a_checkpoint_with_no_recorded_source_needs_a_baseline(example_checkpoint: Path):
    with pytest.raises(UserError, match="--baseline"):
        validate(example_checkpoint, **SMALL)


@pytest.mark.exhaustive
@pytest.mark.alone
def test_a_server_that_is_already_running_is_judged_by_its_url(example_checkpoint: Path, tmp_path: Path):
    serve = [sys.executable, "-P", "-m", "scalegate.pipeline", "serve", str(example_checkpoint)]
    serve += ["--port", "0", "--device", "cpu", "--max-model-len", "128", "--max-num-seqs", "4"]
    with SubprocessEndpoint(serve, "running", log=tmp_path / "log", progress=False) as running:
        arguments = [str(example_checkpoint), "--baseline", str(example_checkpoint), "--m", "2", "--json"]
        arguments += ["--engine", running.base_url, "--baseline-engine", "embedded"]
        arguments += ["--floor", str(FAR_FLOOR), "--max-blocks", str(NO_NEW_SERVERS)]
        result = CliRunner().invoke(command, [*arguments, *SMALL_LOAD])
    verdict = Verdict.from_json(json.loads(result.stdout))
    assert result.exit_code == verdict.exit_status
    assert verdict.environment.engine == running.base_url
    assert verdict.status == "pass", verdict.failures


@pytest.mark.exhaustive
def test_a_server_behind_a_url_on_the_same_device_fails_in_other_layouts_than_the_plans(
    artifact: Path, tmp_path: Path
):
    copy = shutil.copytree(artifact, tmp_path / "copy")
    layout(copy, force="cpu_int4", ms=(1,), progress=False)
    serve = [sys.executable, "-P", "-m", "scalegate.pipeline", "serve", str(copy), "--port", "0"]
    serve += ["--layout", SLOW_LAYOUT, "--device", "cpu", "--max-model-len", "128", "--max-num-seqs", "4"]
    with SubprocessEndpoint(serve, "running", log=tmp_path / "log", progress=False) as running:
        asked = {"m": (1,), "engine": running.base_url, "baseline_engine": "embedded"}
        verdict = validate(copy, floor=FAR_FLOOR, max_blocks=6, **asked, **SMALL)
    loads = next(check for check in verdict.checks if check.name == "loads")
    assert loads.status == "fail"
    assert "server packed its layers as" in loads.reason and f"in {SLOW_LAYOUT}" in loads.reason
