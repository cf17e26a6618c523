"""What is never published: anything but exactly the bytes that a passing verdict names."""

import json
import shutil
from dataclasses import replace

import pytest
from passed_artifact import SHARDS, edit_json, give_verdict, make_artifact, passing_verdict
from scalegate.layouts.errors import UserError
from scalegate.layouts.files import write_json
from scalegate.pipeline.artifact import MANIFEST_NAME, VERDICT_NAME, Artifact
from scalegate.pipeline.push import push
from scalegate.serving_check.verdict import CheckResult


def remove_verdict(artifact):
    (artifact / VERDICT_NAME).unlink()


def flip_one_bit(artifact):
    path = artifact / SHARDS[1]
    content = bytearray(path.read_bytes())
    content[1000] ^= 1
    path.write_bytes(content)


def truncate_a_shard(artifact):
    path = artifact / SHARDS[1]
    path.write_bytes(path.read_bytes()[:-1])


def remove_a_shard(artifact):
    (artifact / SHARDS[1]).unlink()


def add_a_file(artifact):
    (artifact / "extra.safetensors").write_bytes(b"not validated")


def edit_the_config(artifact):
    edit_json(artifact / "config.json", hidden_size=1)


def take_another_artifacts_verdict(artifact):
    other = make_artifact(artifact.parent / "other", seed=1)
    shutil.copy(other / VERDICT_NAME, artifact / VERDICT_NAME)


def take_another_artifacts_verdict_and_say_so_in_the_manifest(artifact):
    other = make_artifact(artifact.parent / "other", seed=1)
    manifest = Artifact.read(artifact)
    give_verdict(artifact, manifest, passing_verdict(Artifact.read(other)))


def put_a_verdict_there_by_hand(artifact):
    edit_json(artifact / MANIFEST_NAME, verdict_sha256=None)


def edit_the_verdict(artifact):
    verdict = json.loads((artifact / VERDICT_NAME).read_text())
    verdict["curve"][0]["ratio"] = 9.0
    write_json(artifact / VERDICT_NAME, verdict)


def fail(artifact):
    manifest = Artifact.read(artifact)
    failed = CheckResult("throughput", "fail", "0.41 at M=32", ">= 0.93", "down 256x768 on a slow kernel")
    verdict = passing_verdict(manifest)
    give_verdict(artifact, manifest, replace(verdict, status="fail", checks=(*verdict.checks, failed)))


def fail_and_edit_it_to_a_pass(artifact):
    fail(artifact)
    edit_json(artifact / VERDICT_NAME, status="pass")


def leave_undecided(artifact):
    manifest = Artifact.read(artifact)
    undecided = CheckResult(
        "throughput", "inconclusive", "0.91 to 0.97", ">= 0.93", "the interval is too wide"
    )
    give_verdict(
        artifact, manifest, replace(passing_verdict(manifest), status="inconclusive", checks=(undecided,))
    )


def lay_out_again(artifact):
    edit_json(artifact / MANIFEST_NAME, layout_plan={"device": "cpu", "versions": {}, "choices": []})


def break_the_verdict(artifact):
    (artifact / VERDICT_NAME).write_text("{")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (remove_verdict, "has no verdict"),
        (flip_one_bit, f"{SHARDS[1]}: sha256 differs"),
        (truncate_a_shard, f"{SHARDS[1]}: 299999 bytes"),
        (remove_a_shard, f"{SHARDS[1]}: missing"),
        (add_a_file, "extra.safetensors: not recorded"),
        (edit_the_config, "config.json"),
        (take_another_artifacts_verdict, "a verdict on other bytes"),
        (take_another_artifacts_verdict_and_say_so_in_the_manifest, "a verdict on other bytes"),
        (put_a_verdict_there_by_hand, "names no verdict"),
        (edit_the_verdict, "was edited after it was given"),
        (fail, "throughput: 0.41 at M=32, bound >= 0.93. down 256x768 on a slow kernel"),
        (fail_and_edit_it_to_a_pass, "was edited after it was given"),
        (leave_undecided, "inconclusive"),
        (lay_out_again, "laid out again"),
        (break_the_verdict, "not valid JSON"),
    ],
)
@pytest.mark.parametrize("dry_run", [False, True])
def test_refused_and_nothing_published(artifact, tmp_path, spoil, words, dry_run):
    spoil(artifact)
    with pytest.raises(UserError) as refusal:
        push(artifact, f"folder:{tmp_path / 'release'}", dry_run=dry_run)
    assert words in refusal.value.message
    assert refusal.value.exit_code == 2
    assert not (tmp_path / "release").exists()


def test_the_same_artifact_unspoilt_is_published(artifact, tmp_path):
    assert push(artifact, f"folder:{tmp_path / 'release'}").status == "pushed"


def test_a_folder_that_is_no_artifact_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"no scalegate\.json"):
        push(tmp_path, f"folder:{tmp_path / 'release'}")


def test_no_refused_artifact_reaches_the_hub(hub, pipeline, artifact):
    fail(artifact)
    result = pipeline("push", artifact, "--to", "org/model", **hub.environment())
    assert result.returncode == 2
    assert "throughput" in result.stderr and "Traceback" not in result.stderr
    assert hub.requests == []
