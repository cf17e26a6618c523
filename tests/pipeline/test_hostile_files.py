"""Files made to do harm: each is refused with one line and exit status 2, and nothing outside is touched."""

import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
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


DEEP = '{"a":' * 5000 + "1" + "}" * 5000
A_BOMB = "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9) if i else 'x'}]\n" for i in range(30))


def replace_by_pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def write_header(checkpoint: Path, header: bytes, data: int = 0) -> None:
    with open(checkpoint / "model.safetensors", "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + data)


def tensor(shape: object, offsets: object, dtype: object = "U8") -> bytes:
    return json.dumps({"a": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}).encode()


def million_tensors() -> bytes:
    entry = '"{}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}'
    return ("{" + ",".join(entry.format(f"{i:032}") for i in range(1_000_000)) + "}").encode()


CHECKPOINTS = {
    "config: deep": lambda c: (c / "config.json").write_text(DEEP),
    "config: 70 deep": lambda c: edit(c / "config.json", a=json.loads('{"a":' * 70 + "1" + "}" * 70)),
    "config: 1e999": lambda c: (c / "config.json").write_text('{"model_type": "qwen3", "rope_theta": 1e999}'),
    "config: NaN": lambda c: (c / "config.json").write_text('{"model_type": "qwen3", "rope_theta": NaN}'),
    "config: long number": lambda c: (c / "config.json").write_text('{"a": ' + "9" * 9999 + "}"),
    "config: not UTF-8": lambda c: (c / "config.json").write_bytes(b'{"a": "\xff"}'),
    "config: half a character": lambda c: (c / "config.json").write_text('{"a": "\\ud800"}'),
    "config: a list": lambda c: (c / "config.json").write_text("[1]"),
    "config: a pipe": lambda c: replace_by_pipe(c / "config.json"),
    "config: 40 MB": lambda c: os.truncate(c / "config.json", 40_000_000),
    "config: many values": lambda c: (c / "config.json").write_text("[" + "[]," * 3_000_000 + "1]"),
    "config: text_config": lambda c: edit(c / "config.json", text_config=[1]),
    "config: quantization_config": lambda c: edit(c / "config.json", quantization_config="int4"),
    "config: config_groups": lambda c: edit(
        c / "config.json", quantization_config={"quant_method": "compressed-tensors", "config_groups": [1]}
    ),
    "config: targets": lambda c: edit(
        c / "config.json", quantization_config={"config_groups": {"g": {"targets": [3]}}}
    ),
    "config: ignore": lambda c: edit(c / "config.json", quantization_config={"ignore": {"a": 1}}),
    "config: block": lambda c: edit(c / "config.json", quantization_config={"weight_block_size": [0, 1]}),
    "config: layers": lambda c: edit(c / "config.json", num_hidden_layers=10**9),
    "config: head_dim": lambda c: edit(c / "config.json", head_dim=10**12),
    "header: deep": lambda c: write_header(c, DEEP.encode()),
    "header: a million tensors": lambda c: write_header(c, million_tensors()),
    "header: 99 MB claimed": lambda c: (c / "model.safetensors").write_bytes(
        (99_000_000).to_bytes(8, "little") + b"{"
    ),
    "header: 99 MB of nothing": lambda c: write_header(c, b" " * 99_000_000),
    "header: 2^63 claimed": lambda c: (c / "model.safetensors").write_bytes(b"\xff" * 64),
    "header: 1e999": lambda c: write_header(
        c, b'{"a":{"dtype":"U8","shape":[1e999],"data_offsets":[0,1]}}', 1
    ),
    "header: shape of text": lambda c: write_header(c, tensor("11", [0, 1]), 1),
    "header: shape of numbers in text": lambda c: write_header(c, tensor(["1"], [0, 1]), 1),
    "header: no list": lambda c: write_header(c, tensor(3, [0, 1]), 1),
    "header: negative": lambda c: write_header(c, tensor([-1, -1], [0, 1]), 1),
    "header: a flag": lambda c: write_header(c, tensor([True], [0, 1]), 1),
    "header: huge and empty": lambda c: write_header(c, tensor([0, 2**70], [0, 0])),
    "header: backwards": lambda c: write_header(c, tensor([1], [1, 0]), 1),
    "header: dtype a list": lambda c: write_header(c, tensor([1], [0, 1], ["U8"]), 1),
    "header: metadata a list": lambda c: write_header(c, b'{"__metadata__": [1]}'),
    "header: metadata of numbers": lambda c: write_header(c, b'{"__metadata__": {"a": 1}}'),
    "header: an entry of text": lambda c: write_header(c, b'{"a": "b"}'),
    "weights: a pipe": lambda c: replace_by_pipe(c / "model.safetensors"),
    "index: deep": lambda c: (c / "model.safetensors.index.json").write_text(DEEP),
    "index: a list": lambda c: (c / "model.safetensors.index.json").write_text('{"weight_map": ["a"]}'),
    "index: numbers": lambda c: (c / "model.safetensors.index.json").write_text('{"weight_map": {"a": 3}}'),
    "card: a bomb": lambda c: (c / "README.md").write_text(f"---\n{A_BOMB}---\n"),
    "card: deep": lambda c: (c / "README.md").write_text("---\na: " + "[" * 9999 + "]" * 9999 + "\n---\n"),
    "card: a pipe": lambda c: replace_by_pipe(c / "README.md"),
    "card: 20 MB": lambda c: (c / "README.md").write_text("---\n" + "x" * 20_000_000),
    "card: front matter of 2 MB": lambda c: (c / "README.md").write_text(
        "---\n" + "tags: x\n" * 250_000 + "---\n"
    ),
    "card: a link": lambda c: ((c / "README.md").unlink(), (c / "README.md").symlink_to("/etc/hostname")),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_hostile_checkpoint_is_refused_in_one_line(checkpoint, victim, name):
    CHECKPOINTS[name](checkpoint)
    began = time.monotonic()
    found = refusal("quantize", checkpoint, "--out", victim.parent / "out", "--device", "cpu")
    assert time.monotonic() - began < 5
    assert str(checkpoint) in found and len(found) < 1000
    assert not (victim.parent / "out" / MANIFEST_NAME).exists()


def change_tensor(checkpoint: Path, name: str, change) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    tensors[name] = change(tensors[name])
    save_file(tensors, checkpoint / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("name", ["model.layers.0.mlp.down_proj.weight", "model.norm.weight"])
def test_a_weight_of_other_dimensions_is_refused_by_name(checkpoint, tmp_path, name):
    change_tensor(checkpoint, name, lambda weight: weight.reshape(-1)[:-1])
    found = refusal("quantize", checkpoint, "--out", tmp_path / "out", "--device", "cpu")
    assert f"{name} has shape [" in found


MANIFESTS = {
    "a list": lambda m: m.write_text("[]"),
    "deep": lambda m: m.write_text(DEEP),
    "empty": lambda m: m.write_text(""),
    "not UTF-8": lambda m: m.write_bytes(b"\xff"),
    "a pipe": replace_by_pipe,
    "a folder": lambda m: (m.unlink(), m.mkdir()),
    "no files": lambda m: m.write_text('{"schema_version": 2}'),
    "files a list": lambda m: edit(m, files=["a"]),
    "files of text": lambda m: edit(m, files={"a": "b"}),
    "a file without sha256": lambda m: edit(m, files={"a": {"size": 1}}),
    "a file with more": lambda m: edit(m, files={"a": {"size": 1, "sha256": SHA, "mode": 7}}),
    "a negative size": lambda m: edit(m, files={"a": {"size": -1, "sha256": SHA}}),
    "a short sha256": lambda m: edit(m, files={"a": {"size": 1, "sha256": "00"}}),
    "source a number": lambda m: edit(m, source=3),
    "source with a line break": lambda m: edit(m, source="a\nb"),
    "source no Hub id": lambda m: edit(m, source="a](http://evil)"),
    "recipe a list": lambda m: edit(m, recipe=[1]),
    "versions of numbers": lambda m: edit(m, versions={"torch": 2}),
    "quantization a list": lambda m: edit(m, quantization=[1]),
    "formats text": lambda m: edit(m, quantization={"formats": "int4"}),
    "a format without spec": lambda m: edit(m, quantization={"formats": [{"label": "a", "modules": 1}]}),
    "a format of no name": lambda m: edit(
        m, quantization={"formats": [{"label": "a", "modules": 1, "spec": {}}]}
    ),
    "base_metadata of objects": lambda m: edit(m, base_metadata={"license": {"a": 1}}),
    "layout_plan a list": lambda m: edit(m, layout_plan=[1]),
    "layout_plan empty": lambda m: edit(m, layout_plan={}),
    "layout_plan without choices": lambda m: edit(
        m, layout_plan={"device": "cpu", "versions": {}, "choices": [{"shape": "a"}]}
    ),
    "a key too many": lambda m: edit(m, __class__="x"),
    "another schema": lambda m: edit(m, schema_version=[2]),
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_malformed_manifest_is_refused_in_one_line(artifact, checkpoint, victim, name):
    MANIFESTS[name](artifact / MANIFEST_NAME)
    for command in (
        ["push", artifact, "--to", f"folder:{victim.parent / 'release'}"],
        ["inspect", artifact],
        ["quantize", checkpoint, "--out", artifact, "--overwrite", "--device", "cpu"],
    ):
        assert str(artifact) in refusal(*command)
    assert not (victim.parent / "release").exists()


VERDICTS = {
    "a list": lambda v: v.write_text("[]"),
    "deep": lambda v: v.write_text(DEEP),
    "1e999": lambda v: v.write_text('{"duration_seconds": 1e999}'),
    "a pipe": replace_by_pipe,
    "of no status": lambda v: edit(v, status=3),
    "checks text": lambda v: edit(v, checks="all fine"),
}


@pytest.mark.parametrize("name", VERDICTS)
def test_a_malformed_verdict_is_refused_in_one_line(artifact, victim, name):
    VERDICTS[name](artifact / "serving_check.json")
    found = refusal("push", artifact, "--to", f"folder:{victim.parent / 'release'}")
    assert str(artifact) in found
    assert not (victim.parent / "release").exists()


RECIPES = {
    "a bomb": A_BOMB,
    "deep": "a: " + "[" * 9999 + "]" * 9999,
    "an alias": "name: &a x\ndescription: *a\n",
    "long": "# " + "x" * 70_000,
    "a tag": "name: !!python/object/apply:os.system [true]\n",
    "a strange date": "name: 2001-99-99\n",
    "a strange timestamp": "name: !!timestamp x\n",
    "a long number": "name: " + "9" * 9999 + "\n",
    "a number of base 60": "name: 1" + ":1" * 9999 + "\n",
    "a key that is a list": "? [a]\n: b\n",
    "NUL": "name: \0\n",
    "bound nan": "throughput_floor: .nan\n",
    "bound inf": "max_mean_kl: .inf\n",
    "bound 1e999": "max_mean_kl: 1.0e+999\n",
    "bound huge": "max_mean_kl: " + "9" * 400 + "\n",
    "repeat in a repeat": "ignore: ['re:(a+)+$']\n",
    "many repeats": "ignore: ['re:.*.*.*.*.*.*.*x']\n",
    "many options": "ignore: ['re:" + "a?" * 40 + "a" * 40 + "']\n",
    "many choices": "ignore: ['re:" + "(a|aa)" * 40 + "x']\n",
    "a backreference": "ignore: ['re:(a)\\1']\n",
    "groups in groups": "ignore: ['re:" + "(" * 5000 + ")" * 5000 + "']\n",
    "in a rule": "rules:\n  - modules: 're:(.*)*x'\n    ignore: true\n",
    "many patterns": f"ignore: {['a'] * 999}\n",
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_hostile_recipe_is_refused_in_one_line(checkpoint, victim, name):
    recipe = victim.parent / "mine.yaml"
    recipe.write_text(RECIPES[name])
    began = time.monotonic()
    found = refusal("quantize", checkpoint, "--recipe", recipe, "--out", victim.parent / "out")
    assert time.monotonic() - began < 5
    assert str(recipe) in found and len(found) < 1000


@pytest.mark.parametrize(
    "pattern",
    [
        r".*layers\..*\.(self_attn|mlp)\..*_proj",
        r"model\.layers\.\d+\.mlp\.experts\.\d+\.down_proj\.\d+\.\d+\.w$",
        r"^(?!.*lm_head).*",
        r"(model\.)?layers\.(0|1|2|10)\.[^.]+\.[qkv]_proj",
    ],
)
def test_ordinary_expressions_stay(pattern):
    from scalegate.pipeline.name_patterns import compiled

    assert compiled(pattern).pattern == pattern


def test_a_config_that_names_modules_by_an_endless_expression_is_refused(tmp_path):
    fixture = tmp_path / "fixture"
    shutil.copytree(Path(__file__).parent / "fixtures" / "llmcompressor-w4a16", fixture)
    config = json.loads((fixture / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["targets"] = ["re:(.*)*(.*)*x"]
    (fixture / "config.json").write_text(json.dumps(config))
    assert "may take very long to match" in refusal("inspect", fixture)


MARKUP = "<img src=x onerror=alert(1)> [click](http://evil) `x` *b* | ``` \n---\n# Heading"


def test_a_card_shows_what_a_checkpoint_says_as_plain_text(artifact):
    from passed_artifact import give_verdict, passing_verdict
    from scalegate.pipeline.artifact import Artifact
    from scalegate.pipeline.publishing.card import write_card

    manifest = Artifact.read(artifact)
    clean = write_card(artifact, manifest, passing_verdict(manifest), "org/x", "org/x")
    manifest.recipe = {"name": MARKUP, "description": f"{MARKUP}\n```\n<script>"}
    manifest.versions = {"torch": MARKUP}
    manifest.base_metadata = {"license": "other", "license_name": MARKUP, "tags": [MARKUP, "fine"]}
    manifest.quantization["formats"][0]["label"] = MARKUP
    give_verdict(artifact, manifest, passing_verdict(manifest))
    text = write_card(artifact, manifest, passing_verdict(manifest), "org/x", "org/x")
    front, body = text.removeprefix("---\n").split("---\n", 1)
    assert yaml.safe_load(front)["tags"] == ["scalegate", "int4", "compressed-tensors"]
    prose = re.sub(r"(?ms)^(`{3,})\w*\n.*?^\1$", "", body)
    prose = re.sub(r"`[^`\n]*`", "", prose.replace("\\`", ""))
    assert "<img" not in prose and "<script" not in prose and "](http://evil" not in prose.replace("\\]", "")
    assert "&lt;img src=x" in prose, "it is shown, not dropped"
    headings = re.compile(r"(?m)^#+ .*$")
    assert headings.findall(prose) == headings.findall(re.sub(r"(?ms)^```\w*\n.*?^```$", "", clean))


@pytest.mark.parametrize(
    "entry",
    [DEEP, "1e999", '{"_type": "NVFP4Tensor", "_data": [1]}', "{", '{"_type": ["a"]}'],
    ids=["deep", "1e999", "data a list", "cut off", "type a list"],
)
def test_hostile_torchao_metadata_is_refused(tmp_path, entry):
    fixture = tmp_path / "fixture"
    shutil.copytree(Path(__file__).parent / "fixtures" / "torchao-nvfp4", fixture)
    shard = fixture / "model.safetensors"
    tensors = load_file(shard)
    save_file(tensors, shard, {"format": "pt", "model.layers.0.mlp.down_proj.weight": entry})
    assert str(fixture) in refusal("inspect", fixture)


@pytest.mark.parametrize(
    "record",
    [DEEP, "[]", '{"shards": {"../victim.txt": {}}, "parameters": {}}', '{"shards": [], "parameters": 3}'],
)
def test_a_hostile_work_record_is_refused(checkpoint, victim, record):
    out = victim.parent / "out"
    out.mkdir()
    (out / ".scalegate-quantize.json").write_text(record)
    assert "work record" in refusal("quantize", checkpoint, "--out", out, "--device", "cpu")


def test_what_a_hub_manifest_names_outside_is_not_ours_to_delete():
    from scalegate.pipeline.publishing.hub.repository import _named_in

    assert "a.txt" in _named_in(b'{"files": {"a.txt": {}}}')
    for manifest in (b'{"files": {"../a.txt": {}}}', b'{"files": ["a.txt"]}', b"[1]", DEEP.encode()):
        assert _named_in(manifest) == set()
