"""Contents made to do harm, of every file that is read from outside: refused in one line, exit status 2."""

import json
import os
import re
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file, save_file
from scalegate.pipeline.records.artifact import MANIFEST_NAME
from scalegate.tests.pipeline.hostile.hostile_input import DEEP, SHA, edit, refusal

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
    "index: lists": lambda c: (c / "model.safetensors.index.json").write_text('{"weight_map": {"a": [3]}}'),
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
    began = time.process_time()
    found = refusal("quantize", checkpoint, "--out", victim.parent / "out", "--device", "cpu")
    assert time.process_time() - began < 5
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
    began = time.process_time()
    found = refusal("quantize", checkpoint, "--recipe", recipe, "--out", victim.parent / "out")
    assert time.process_time() - began < 5
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
    from scalegate.pipeline.records.name_patterns import compiled

    assert compiled(pattern).pattern == pattern


def test_a_config_that_names_modules_by_an_endless_expression_is_refused(tmp_path):
    fixture = tmp_path / "fixture"
    shutil.copytree(Path(__file__).parents[1] / "fixtures" / "llmcompressor-w4a16", fixture)
    config = json.loads((fixture / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["targets"] = ["re:(.*)*(.*)*x"]
    (fixture / "config.json").write_text(json.dumps(config))
    assert "may take very long to match" in refusal("inspect", fixture)


MARKUP = "<img src=x onerror=alert(1)> [click](http://evil) `x` *b* | ``` \n---\n# Heading"


def test_a_card_shows_what_a_checkpoint_says_as_plain_text(artifact):
    from scalegate.pipeline.publishing.card import write_card
    from scalegate.pipeline.records.artifact import Artifact
    from scalegate.tests.pipeline.publishing.passed_artifact import give_verdict, passing_verdict

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


def test_a_report_shows_what_a_checkpoint_says_as_plain_text():
    from scalegate.pipeline.report.write import render_report
    from scalegate.serving_check.evidence.evidence import ScoredText
    from scalegate.tests.serving_check.gate_samples import sample_evidence, sample_verdict

    ratios = {1: 1.2, 8: 0.4}
    hostile = sample_evidence(ratios, canary=(ScoredText((1,), MARKUP, 0.5),))
    verdict = sample_verdict(ratios, evidence=hostile)
    named = replace(verdict, artifact=replace(verdict.artifact, name=MARKUP), command=MARKUP)
    pages = [render_report(given)["report.html"].decode() for given in (verdict, named)]
    tags = [re.findall(r"<(?:script|img|a|style|iframe)\b", page) for page in pages]
    assert tags[0] == tags[1], "no element more than in the same page of a harmless name"
    assert "&lt;img src=x onerror" in pages[1], "it is shown, not dropped"


@pytest.mark.parametrize(
    "entry",
    [DEEP, "1e999", '{"_type": "NVFP4Tensor", "_data": [1]}', "{", '{"_type": ["a"]}'],
    ids=["deep", "1e999", "data a list", "cut off", "type a list"],
)
def test_hostile_torchao_metadata_is_refused(tmp_path, entry):
    fixture = tmp_path / "fixture"
    shutil.copytree(Path(__file__).parents[1] / "fixtures" / "torchao-nvfp4", fixture)
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
