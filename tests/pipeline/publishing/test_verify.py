"""`pipeline verify` and `pipeline sign`: what holds, what does not, and who says so."""

import json
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner
from scalegate.base.errors import UserError
from scalegate.pipeline.cli.main import main
from scalegate.pipeline.commands.push import push
from scalegate.pipeline.commands.sign import sign
from scalegate.pipeline.commands.verify import verify
from scalegate.pipeline.records.artifact import SIGNATURE_NAME, VERDICT_NAME
from scalegate.tests.pipeline.publishing.passed_artifact import SHARDS, edit_json, make_artifact
from scalegate.tests.pipeline.publishing.spoilt_artifact import (
    fail_and_edit_it_to_a_pass_with_its_digest,
    lower_the_floor,
    rewritten,
)


def run(*words: object):
    return CliRunner().invoke(main, [str(word) for word in words])


@pytest.fixture(scope="module")
def key(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", path], check=True)
    return path


@pytest.fixture
def signers(key: Path, tmp_path: Path) -> Path:
    path = tmp_path / "allowed_signers"
    path.write_text(f'maker@example.org namespaces="scalegate" {key.with_suffix(".pub").read_text()}')
    return path


@pytest.fixture
def release(artifact: Path, tmp_path: Path) -> Path:
    push(artifact, f"folder:{tmp_path / 'release'}")
    return tmp_path / "release"


@pytest.fixture
def signed(artifact: Path, key: Path, tmp_path: Path) -> Path:
    sign(artifact, key)
    push(artifact, f"folder:{tmp_path / 'signed'}")
    return tmp_path / "signed"


def test_a_release_holds_and_says_that_nobody_signed_it(release: Path):
    result = run("verify", release)
    assert result.exit_code == 0, result.output
    lines = {line[5:19].strip(): line for line in result.output.splitlines()}
    assert lines["signature"].startswith("?") and "may have made them up" in lines["signature"]
    assert {name for name, line in lines.items() if line.startswith("ok")} == {
        "files", "kinds of files", "bytes", "verdict", "layout plan", "manifest", "recipe", "rival",
        "invariance", "report", "figures", "policy", "status", "card",
    }  # fmt: skip


def change_a_shard(release: Path) -> None:
    (release / SHARDS[0]).write_bytes(b"other weights")


def add_a_file(release: Path) -> None:
    (release / "extra.safetensors").write_bytes(b"weights")


def edit_the_verdict(release: Path) -> None:
    edit_json(release / VERDICT_NAME, command="pipeline validate something else")


@pytest.mark.parametrize(
    ("spoil", "name"),
    [
        (change_a_shard, "files"),
        (add_a_file, "files"),
        (edit_the_verdict, "verdict"),
        (fail_and_edit_it_to_a_pass_with_its_digest, "figures"),
    ],
)
def test_what_does_not_hold_is_named_and_the_status_is_1(release: Path, spoil, name: str):
    spoil(release)
    result = run("verify", release, "--json")
    assert result.exit_code == 1, result.output
    found = json.loads(result.stdout)
    assert found["holds"] == "no"
    assert name in [finding["name"] for finding in found["findings"] if finding["holds"] == "no"]


def test_an_exploratory_verdict_and_none_at_all_cannot_be_told(release: Path):
    lower_the_floor(release)
    assert run("verify", release).exit_code == 2
    (release / VERDICT_NAME).unlink()
    result = run("verify", release)
    assert result.exit_code == 2 and "has no verdict" in result.output


def test_a_card_that_says_something_else_cannot_be_vouched_for(release: Path):
    (release / "README.md").write_text("# Twice as fast as light\n")
    found = verify(release)
    assert found.holds == "unknown" and found.exit_status == 2
    assert [finding.name for finding in found.findings if finding.holds == "unknown"] == ["signature", "card"]


def test_a_signature_travels_with_the_release_and_names_its_signer(signed: Path, signers: Path):
    assert verify(signed).signature.state == "good"
    found = verify(signed, signers=signers)
    assert (found.signature.state, found.signature.signer) == ("trusted", "maker@example.org")
    assert found.holds == "yes"
    shown = run("verify", signed, "--signers", signers).output
    assert "by maker@example.org, key SHA256:" in shown


def test_signers_that_were_asked_for_must_have_signed(
    release: Path, signed: Path, signers: Path, tmp_path: Path
):
    assert run("verify", release, "--signers", signers).exit_code == 1
    others = tmp_path / "others"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "other"], check=True)
    others.write_text(f"other@example.org {(tmp_path / 'other.pub').read_text()}")
    result = run("verify", signed, "--signers", others)
    assert result.exit_code == 1 and "not among the allowed signers" in result.output


def test_whoever_edits_a_signed_verdict_with_all_its_digests_is_found_out(signed: Path, signers: Path):
    rewritten(signed, lambda value: value.update(created="2030-01-01T00:00:00+00:00"))
    found = verify(signed)
    assert found.signature.state == "bad" and found.holds == "no"


def test_the_control_unsigned_such_an_edit_is_not_found_out(release: Path):
    rewritten(release, lambda value: value.update(created="2030-01-01T00:00:00+00:00"))
    assert verify(release).holds == "yes"


def test_a_signature_from_another_artifact_is_refused(signed: Path, key: Path, tmp_path: Path):
    other = make_artifact(tmp_path / "other", seed=1)
    (other / SIGNATURE_NAME).write_bytes((signed / SIGNATURE_NAME).read_bytes())
    with pytest.raises(UserError, match="does not fit"):
        push(other, f"folder:{tmp_path / 'out'}")


def test_only_what_holds_is_signed_and_only_by_a_key(artifact: Path, key: Path):
    assert run("sign", artifact, "--key", key).exit_code == 0
    result = run("sign", artifact, "--key", artifact / "no-key")
    assert result.exit_code == 2 and "ssh-keygen -t ed25519" in result.output
    edit_the_verdict(artifact)
    result = run("sign", artifact, "--key", key)
    assert result.exit_code == 2 and "edited after it was given" in result.output
