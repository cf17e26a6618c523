"""Files that only some readers take are compared by what is in them."""

import json
import shutil
from pathlib import Path

import pytest
from scalegate.pipeline.checkpoints.checkpoint import open_checkpoint
from scalegate.pipeline.validation.text_files import compare_text_files

VOCABULARY = {"a": 0, "b": 1}


@pytest.mark.parametrize(
    ("name", "ours", "theirs", "part"),
    [
        ("vocab.json", json.dumps({"b": 1, "a": 0}, indent=1), json.dumps(VOCABULARY), None),
        ("vocab.json", json.dumps({"a": 1, "b": 0}), json.dumps(VOCABULARY), "vocabulary"),
        ("vocab.json", json.dumps(VOCABULARY), None, "vocabulary"),
        ("vocab.json", None, json.dumps(VOCABULARY), None),
        ("merges.txt", "a b\n", "b a\n", "merges"),
        ("additional_chat_templates/tool.jinja", "{{ a }}", "{{ b }}", "chat_template"),
    ],
)
def test_a_file_that_says_something_else_is_named(
    example_checkpoint: Path,
    tmp_path: Path,
    name: str,
    ours: str | None,
    theirs: str | None,
    part: str | None,
):
    sides = []
    for folder, content in (("ours", ours), ("theirs", theirs)):
        copy = shutil.copytree(example_checkpoint, tmp_path / folder)
        if content is not None:
            (copy / name).parent.mkdir(exist_ok=True)
            (copy / name).write_text(content)
        sides.append(open_checkpoint(copy))
    found = [difference for difference in compare_text_files(*sides) if name in difference.where]
    assert [difference.part for difference in found] == ([] if part is None else [part])
