"""Files that have no business in an artifact or a release: left behind and listed, or refused."""

import json
import os
from pathlib import Path

import pytest
from scalegate.pipeline.records.artifact import MANIFEST_NAME
from scalegate.tests.pipeline.hostile.hostile_input import VICTIM, refusal, run


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
    from scalegate.pipeline.records.artifact import Artifact, record_files
    from scalegate.tests.pipeline.publishing.passed_artifact import give_verdict, passing_verdict

    for name, allowed in (("LICENSE", True), ("id_rsa", False)):
        (artifact / name).write_text("secret")
        manifest = Artifact.read(artifact)
        manifest.files = record_files(artifact)
        give_verdict(artifact, manifest, passing_verdict(manifest))
        result = run("push", artifact, "--to", f"folder:{tmp_path / 'release'}", "--dry-run")
        assert (result.exit_code == 0) == allowed, result.output
    assert "names id_rsa: not a kind of file" in result.stderr


def test_what_was_added_to_the_report_is_refused_whatever_it_is(artifact, victim):
    report = artifact / "serving_check"
    (report / "passwords.txt").write_text("secret")
    (report / "leak.png").symlink_to(victim)
    os.mkfifo(report / "pipe.html")
    (report / "ratio.png").unlink()
    (report / "ratio.png").symlink_to(victim)
    release = victim.parent / "release"
    result = run("push", artifact, "--to", f"folder:{release}", "--json")
    assert result.exit_code == 2 and not release.exists()
    for name in ("leak.png", "passwords.txt", "pipe.html"):
        assert f"'serving_check/{name}' was added" in result.stderr
    assert "'serving_check/ratio.png': a symlink that leads out" in result.stderr


@pytest.mark.parametrize("record", ["serving_check.json", MANIFEST_NAME])
def test_a_record_that_is_a_link_out_is_not_published(artifact, tmp_path, record):
    (artifact / record).rename(tmp_path / record)
    (artifact / record).symlink_to(tmp_path / record)
    result = run("push", artifact, "--to", f"folder:{tmp_path / 'release'}")
    assert result.exit_code == 2 and "symlink that leads out" in result.stderr
