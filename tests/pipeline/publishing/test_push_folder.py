"""Publishing into a folder: whole or as it was, and only ever in place of an earlier release of ours."""

import os
import signal

import pytest
from scalegate.base.errors import UserError
from scalegate.pipeline.commands.push import push
from scalegate.pipeline.publishing import folder_target
from scalegate.tests.pipeline.publishing.passed_artifact import SHARDS, make_artifact


def content(folder):
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def without_card(folder):
    return {name: data for name, data in content(folder).items() if name != "README.md"}


def test_the_folder_holds_the_artifact_and_its_card(artifact, tmp_path):
    release = tmp_path / "out" / "release"
    assert push(artifact, f"folder:{release}").status == "pushed"
    assert without_card(release) == content(artifact)
    assert (release / "README.md").is_file()
    assert os.listdir(release.parent) == ["release"], "nothing is left beside it"


def test_the_same_bytes_again_are_a_no_op(artifact, tmp_path):
    release = tmp_path / "release"
    push(artifact, f"folder:{release}")
    before = (release / SHARDS[0]).stat().st_ino
    assert push(artifact, f"folder:{release}").status == "unchanged"
    assert (release / SHARDS[0]).stat().st_ino == before


def test_a_dry_run_touches_nothing(artifact, tmp_path):
    result = push(artifact, f"folder:{tmp_path / 'new' / 'release'}", dry_run=True)
    assert result.status == "planned"
    assert {operation.subject for operation in result.operations} == {*content(artifact), "README.md"}
    assert not (tmp_path / "new").exists()


def test_an_earlier_release_is_replaced_whole(artifact, tmp_path):
    release = tmp_path / "release"
    push(artifact, f"folder:{release}")
    second = make_artifact(tmp_path / "second", seed=1, shards=SHARDS[:2])
    assert push(second, f"folder:{release}").status == "pushed"
    assert without_card(release) == content(second)
    assert not list(tmp_path.glob(".release.*"))


@pytest.mark.parametrize("exchange", ["in one step", "in two"])
def test_two_folders_trade_names(tmp_path, monkeypatch, exchange):
    if exchange == "in two":
        monkeypatch.setattr(folder_target.ctypes, "CDLL", lambda *a, **k: None)
    for name in ("left", "right"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    folder_target._exchange(tmp_path / "left", tmp_path / "right")
    assert os.listdir(tmp_path / "left") == ["right"]
    assert os.listdir(tmp_path / "right") == ["left"]
    assert sorted(os.listdir(tmp_path)) == ["left", "right"]


@pytest.mark.parametrize("name", ["thesis.txt", "model.safetensors"])
def test_other_content_is_left_alone(artifact, tmp_path, name):
    release = tmp_path / "release"
    release.mkdir()
    (release / name).write_text("precious")
    with pytest.raises(UserError, match="not a release of ours"):
        push(artifact, f"folder:{release}")
    assert content(release) == {name: b"precious"}


def test_a_file_added_to_a_release_is_not_deleted_with_it(artifact, tmp_path):
    release = tmp_path / "release"
    push(artifact, f"folder:{release}")
    (release / "thesis.txt").write_text("precious")
    second = make_artifact(tmp_path / "second", seed=1)
    with pytest.raises(UserError, match=r"thesis\.txt"):
        push(second, f"folder:{release}")
    assert (release / "thesis.txt").exists()


def test_the_artifact_itself_is_no_target(artifact):
    with pytest.raises(UserError, match="lies in the artifact"):
        push(artifact, f"folder:{artifact / 'release'}")


@pytest.mark.parametrize("option", [{"private": True}, {"create_pr": True}, {"revision": "int4"}])
def test_hub_options_mean_nothing_to_a_folder(artifact, tmp_path, option):
    with pytest.raises(UserError, match="apply to the Hub only"):
        push(artifact, f"folder:{tmp_path / 'release'}", **option)


@pytest.mark.parametrize("after_files", [1, 3])
def test_killed_half_way_and_run_again(artifact, tmp_path, after_files):
    release = tmp_path / "release"
    first = make_artifact(tmp_path / "first", seed=1)
    push(first, f"folder:{release}")
    before = content(release)
    if (child := os.fork()) == 0:
        copied = []
        copy_one = folder_target._copy_one

        def killed_after(file, copy):
            if len(copied) == after_files:
                copy.write_bytes(b"half")
                os.kill(os.getpid(), signal.SIGKILL)
            copied.append(file.path)
            copy_one(file, copy)

        folder_target._copy_one = killed_after
        push(artifact, f"folder:{release}", progress=False)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert content(release) == before

    copied = []
    copy_one = folder_target._copy_one
    folder_target._copy_one = lambda file, copy: (copied.append(file.path), copy_one(file, copy))
    try:
        push(artifact, f"folder:{release}")
    finally:
        folder_target._copy_one = copy_one
    assert without_card(release) == content(artifact)
    assert len(copied) == len(content(release)) - after_files, "what was copied whole was copied again"
    assert not list(tmp_path.glob(".release.*"))


def test_a_source_that_changes_under_the_copy_is_not_published(artifact, tmp_path, monkeypatch):
    preview = folder_target.preview_folder

    def preview_then_change(files, directory):
        (artifact / SHARDS[0]).write_bytes(b"\1" * 300_000)
        return preview(files, directory)

    monkeypatch.setattr(folder_target, "preview_folder", preview_then_change)
    with pytest.raises(UserError, match="changed while it was being published"):
        push(artifact, f"folder:{tmp_path / 'release'}")
    assert not (tmp_path / "release").exists()


def test_too_little_room_is_said_before_anything_is_written(artifact, tmp_path, monkeypatch):
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(folder_target.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(UserError, match="1,000 are free"):
        push(artifact, f"folder:{tmp_path / 'release'}")
    assert not list(tmp_path.glob(".release*"))
