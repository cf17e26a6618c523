"""Names that lead out of their folder: refused in one line, exit status 2, and nothing outside is touched."""

import json
import os
import shutil
from pathlib import Path

import pytest
from scalegate.pipeline.records.artifact import MANIFEST_NAME
from scalegate.tests.pipeline.hostile.hostile_input import DEEP, VICTIM, add_file, edit, refusal, run


def names_outside(victim: Path) -> list[str]:
    return [
        "../victim.txt", str(victim), "sub/../../victim.txt", "./victim.txt", "a//b", "a\0b", "..", ".", "",
        "..\\victim.txt", "C:/victim.txt", "a\nb", "\ud800", "x" * 2000,
    ]  # fmt: skip


NAMES = range(len(names_outside(Path("/x"))))


@pytest.mark.parametrize("index", NAMES)
def test_overwrite_deletes_nothing_outside_its_folder(checkpoint, artifact, victim, index):
    add_file(artifact, names_outside(victim)[index])
    found = refusal("quantize", checkpoint, "--out", artifact, "--overwrite", "--device", "cpu")
    assert str(artifact / MANIFEST_NAME) in found
    assert (artifact / "model-00001-of-00003.safetensors").exists(), "nothing of the artifact is gone either"


def test_overwrite_follows_no_link_out_of_its_folder(checkpoint, artifact, victim):
    elsewhere = victim.parent / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "thesis.txt").write_text(VICTIM)
    (artifact / "sub").symlink_to(elsewhere)
    add_file(artifact, "sub/thesis.txt")
    refusal("quantize", checkpoint, "--out", artifact, "--overwrite", "--device", "cpu")
    assert (elsewhere / "thesis.txt").read_text() == VICTIM


@pytest.mark.parametrize("index", NAMES)
def test_push_writes_nothing_outside_its_target(artifact, victim, index):
    add_file(artifact, names_outside(victim)[index])
    found = refusal("push", artifact, "--to", f"folder:{victim.parent / 'out' / 'release'}")
    assert str(artifact / MANIFEST_NAME) in found
    assert not (victim.parent / "out").exists()


def test_push_sends_no_file_that_a_link_leads_to(artifact, victim):
    (artifact / "NOTICE.txt").symlink_to(victim)
    import hashlib

    files = json.loads((artifact / MANIFEST_NAME).read_text())["files"]
    record = {"size": len(VICTIM), "sha256": hashlib.sha256(VICTIM.encode()).hexdigest()}
    edit(artifact / MANIFEST_NAME, files=files | {"NOTICE.txt": record})
    result = run("push", artifact, "--to", f"folder:{victim.parent / 'release'}")
    assert result.exit_code == 2 and "NOTICE.txt: a symlink that leads out" in result.stderr
    assert not (victim.parent / "release").exists()


@pytest.mark.parametrize("index", NAMES)
def test_a_release_to_be_replaced_names_no_file_outside(artifact, victim, index):
    """The manifest in the target says what may be replaced there."""
    release = victim.parent / "release"
    shutil.copytree(artifact, release)
    add_file(release, names_outside(victim)[index])
    before = sorted(path.name for path in release.iterdir())
    assert str(release / MANIFEST_NAME) in refusal("push", artifact, "--to", f"folder:{release}")
    assert sorted(path.name for path in release.iterdir()) == before


@pytest.mark.parametrize("index", NAMES)
def test_an_index_names_only_files_of_its_folder(checkpoint, victim, index):
    name = names_outside(victim)[index]
    index_path = checkpoint / "model.safetensors.index.json"
    index_path.write_text(json.dumps({"weight_map": {"a.weight": name}}))
    assert str(index_path) in refusal("inspect", checkpoint)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_link_out_of_a_plain_folder_is_not_read(checkpoint, tmp_path, name):
    (checkpoint / name).rename(tmp_path / name)
    (checkpoint / name).symlink_to(tmp_path / name)
    assert f"{name} is not used (a symlink that leads out" in refusal("inspect", checkpoint)


def hub_snapshot(checkpoint: Path, cache: Path) -> Path:
    """`checkpoint` as the Hub's cache holds it: links to blobs."""
    repository = cache / "models--org--model"
    snapshot = repository / "snapshots" / "0123"
    (repository / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(p for p in checkpoint.iterdir() if p.is_file())):
        shutil.copy(path, repository / "blobs" / f"{number:040x}")
        (snapshot / path.name).symlink_to(Path("../../blobs") / f"{number:040x}")
    return snapshot


def test_the_links_of_a_hub_cache_are_read(checkpoint, tmp_path):
    snapshot = hub_snapshot(checkpoint, tmp_path)
    assert run("inspect", snapshot).exit_code == 0
    result = run("quantize", snapshot, "--out", tmp_path / "out", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    assert not os.path.islink(tmp_path / "out" / "tokenizer.json")


def test_a_target_that_cannot_be_a_release_is_refused(artifact, tmp_path):
    assert "root of a disk" in refusal("push", artifact, "--to", "folder:/")
    assert "cannot be printed" in refusal("push", artifact, "--to", "folder:a\0b")
    release = tmp_path / "release"
    shutil.copytree(artifact, release)
    os.mkfifo(release / "serving_check" / "pipe")
    assert "not a regular file" in refusal("push", artifact, "--to", f"folder:{release}")


def test_nothing_is_written_through_a_link_beside_the_target(artifact, victim):
    from scalegate.pipeline.commands.push import push

    target = victim.parent / "release"
    plan = push(artifact, f"folder:{target}", dry_run=True)
    assert plan.status == "planned"
    (artifact / f"{MANIFEST_NAME}.partial").symlink_to(victim)
    from scalegate.pipeline.records.artifact import Artifact

    Artifact.read(artifact).write(artifact)
    assert not (artifact / f"{MANIFEST_NAME}.partial").exists()


def test_what_a_hub_manifest_names_outside_is_not_ours_to_delete():
    from scalegate.pipeline.publishing.hub.repository import _named_in

    assert "a.txt" in _named_in(b'{"files": {"a.txt": {}}}')
    for manifest in (b'{"files": {"../a.txt": {}}}', b'{"files": ["a.txt"]}', b"[1]", DEEP.encode()):
        assert _named_in(manifest) == set()
