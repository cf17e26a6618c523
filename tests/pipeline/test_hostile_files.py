"""Files made to do harm: each is refused with one line and exit status 2, and nothing outside is touched."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from scalegate.pipeline.artifact import MANIFEST_NAME
from scalegate.pipeline.cli.main import main

PUBLISHING = Path(__file__).parent / "publishing"
SHA = "0" * 64
VICTIM = "years of work"


def run(*arguments: object):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def refusal(*arguments: object) -> str:
    """The one line of a command that must refuse; warnings of libraries are not counted."""
    result = run(*arguments)
    assert result.exit_code == 2, (result.exit_code, result.output, result.exception)
    assert isinstance(result.exception, SystemExit), result.exception
    lines = result.stderr.splitlines()
    errors = [line for line in lines if line.startswith("Error: ")]
    assert len(errors) == 1, result.stderr
    assert "Traceback" not in result.output
    return errors[0]


@pytest.fixture
def checkpoint(example_checkpoint: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    shutil.copytree(example_checkpoint, folder)
    return folder


@pytest.fixture
def artifact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small artifact that has passed its gate."""
    monkeypatch.syspath_prepend(str(PUBLISHING))
    from passed_artifact import make_artifact

    return make_artifact(tmp_path / "artifact")


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Path]:
    """A file beside every folder of a test, which no test may change."""
    path = tmp_path / "victim.txt"
    path.write_text(VICTIM)
    yield path
    assert path.read_text() == VICTIM


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes))


def add_file(artifact: Path, name: str) -> None:
    """Let the manifest claim one file more."""
    manifest = artifact / MANIFEST_NAME
    files = json.loads(manifest.read_text(encoding="utf-8"))["files"]
    edit(manifest, files=files | {name: {"size": len(VICTIM), "sha256": SHA}})


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
    from scalegate.pipeline.push import push

    target = victim.parent / "release"
    plan = push(artifact, f"folder:{target}", dry_run=True)
    assert plan.status == "planned"
    (artifact / f"{MANIFEST_NAME}.partial").symlink_to(victim)
    from scalegate.pipeline.artifact import Artifact

    Artifact.read(artifact).write(artifact)
    assert not (artifact / f"{MANIFEST_NAME}.partial").exists()


def add_strangers(checkpoint: Path, victim: Path) -> dict[str, str]:
    """Files that have no business in a release, and a word of the reason each is left out for."""
    (checkpoint / "NOTICE.txt").symlink_to(victim)
    (checkpoint / "id_rsa").write_text("secret")
    (checkpoint / "train.log").write_text("secret")
    (checkpoint / "modeling_x.py").write_text("secret")
    (checkpoint / "runs").mkdir()
    (checkpoint / "runs" / "tokenizer.json").write_text("secret")
    (checkpoint / "elsewhere").symlink_to(victim.parent)
    os.mkfifo(checkpoint / "merges.txt")
    (checkpoint / "LICENSE\nx.txt").write_text("secret")
    with open(os.fsencode(checkpoint) + b"/vocab\xff.txt", "w") as file:
        file.write("secret")
    kind = "not a kind of file"
    return {
        "NOTICE.txt": "symlink",
        "id_rsa": kind,
        "train.log": kind,
        "modeling_x.py": kind,
        "runs/tokenizer.json": kind,
        "elsewhere": "symlink",
        "merges.txt": "not a regular file",
        "LICENSE\\nx.txt": "cannot be printed",
        "vocab\\udcff.txt": "cannot be printed",
    }


def test_only_files_of_known_kinds_travel_and_the_rest_is_listed(checkpoint, victim):
    reasons = add_strangers(checkpoint, victim)
    for name in ("LICENSE", "USE_POLICY.md", "chat_template.jinja", "tokenizer.model"):
        (checkpoint / name).write_text("fine")
    (checkpoint / ".env").write_text("secret")
    out = victim.parent / "out"
    result = run("quantize", checkpoint, "--out", out, "--device", "cpu", "--json")
    assert result.exit_code == 0, result.output
    left_out = json.loads(result.stdout)["left_out"]
    assert left_out.keys() == reasons.keys()
    assert all(reasons[name] in left_out[name] for name in reasons)
    assert all(f"left out {name}: " in result.stderr for name in reasons)
    expected = {"LICENSE", "USE_POLICY.md", "chat_template.jinja", "tokenizer.model", "tokenizer.json"}
    expected |= {"config.json", "generation_config.json", "model.safetensors", "tokenizer_config.json"}
    files = json.loads((out / MANIFEST_NAME).read_text())["files"]
    assert files.keys() == expected
    for path in (path for path in out.rglob("*") if path.is_file()):
        assert b"secret" not in path.read_bytes() and VICTIM.encode() not in path.read_bytes(), path


def test_a_recipe_adds_files_but_no_links(checkpoint, victim):
    add_strangers(checkpoint, victim)
    recipe = victim.parent / "mine.yaml"
    recipe.write_text("files: ['*.py', 'runs/*.json', 'NOTICE.txt']\n")
    out = victim.parent / "out"
    result = run("quantize", checkpoint, "--out", out, "--device", "cpu", "--recipe", recipe)
    assert result.exit_code == 0, result.output
    files = json.loads((out / MANIFEST_NAME).read_text())["files"]
    assert {"modeling_x.py", "runs/tokenizer.json"} < files.keys()
    assert not {"NOTICE.txt", "id_rsa"} & files.keys()


@pytest.mark.parametrize("pattern", ["../*", "/etc/*", "", "a\0"])
def test_a_recipe_asks_for_no_files_outside(checkpoint, tmp_path, pattern):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(json.dumps({"files": [pattern]}))
    found = refusal("quantize", checkpoint, "--recipe", recipe, "--out", tmp_path / "out")
    assert "line 1: `files` is a list of patterns" in found


def test_a_manifest_that_claims_a_stranger_is_not_pushed(artifact, tmp_path):
    """As one made before kinds were looked at: manifest and verdict agree on the file."""
    from passed_artifact import give_verdict, passing_verdict
    from scalegate.pipeline.artifact import Artifact, record_files

    for name, allowed in (("LICENSE", True), ("id_rsa", False)):
        (artifact / name).write_text("secret")
        manifest = Artifact.read(artifact)
        manifest.files = record_files(artifact)
        give_verdict(artifact, manifest, passing_verdict(manifest))
        result = run("push", artifact, "--to", f"folder:{tmp_path / 'release'}", "--dry-run")
        assert (result.exit_code == 0) == allowed, result.output
    assert "names id_rsa: not a kind of file" in result.stderr


def test_the_report_takes_only_its_own_files_along(artifact, victim):
    report = artifact / "serving_check"
    (report / "passwords.txt").write_text("secret")
    (report / "leak.png").symlink_to(victim)
    os.mkfifo(report / "pipe.html")
    release = victim.parent / "release"
    result = run("push", artifact, "--to", f"folder:{release}", "--json")
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in (release / "serving_check").iterdir()) == [
        "ratio.png",
        "throughput.png",
    ]
    notes = json.loads(result.stdout)["notes"]
    assert [note.split(": ")[0] for note in notes] == [
        "left out serving_check/leak.png",
        "left out serving_check/passwords.txt",
        "left out serving_check/pipe.html",
    ]


@pytest.mark.parametrize("record", ["serving_check.json", MANIFEST_NAME])
def test_a_record_that_is_a_link_out_is_not_published(artifact, tmp_path, record):
    (artifact / record).rename(tmp_path / record)
    (artifact / record).symlink_to(tmp_path / record)
    result = run("push", artifact, "--to", f"folder:{tmp_path / 'release'}")
    assert result.exit_code == 2 and "symlink that leads out" in result.stderr
