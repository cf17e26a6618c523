"""`serving_check.json`: its form, its documented schema, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter
from scalegate.base.errors import UserError
from scalegate.serving_check.evidence import verdict
from scalegate.serving_check.evidence.verdict import CheckResult, Verdict, overall_status
from scalegate.serving_check.gate.record import parse_verdict
from scalegate.serving_check.settings import Bounds, WorkloadSettings

from ...verdict_files import read_verdict
from ..gate_samples import sample_verdict

SCHEMA_PATH = Path(verdict.__file__).parents[1] / "schema" / "serving_check.schema.json"


def json_schema() -> dict[str, Any]:
    """The JSON Schema of `serving_check.json`, of which the tree keeps a copy for its readers."""
    schema = TypeAdapter(Verdict).json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def test_a_verdict_comes_back_from_its_file_as_it_went(tmp_path: Path):
    verdict = sample_verdict({1: 1.0, 8: 1.2})
    verdict.write(tmp_path / "serving_check.json")
    assert read_verdict(tmp_path / "serving_check.json") == verdict


def test_the_schema_in_the_tree_is_the_one_of_the_code():
    assert json.loads(SCHEMA_PATH.read_text(encoding="utf-8")) == json.loads(json.dumps(json_schema()))


def test_a_verdict_has_exactly_the_fields_that_the_schema_documents():
    schema = json_schema()
    assert undocumented(sample_verdict({1: 1.0}).to_json(), schema, schema) == []


def undocumented(value: object, schema: dict, root: dict, where: str = "$") -> list[str]:
    """Fields of `value` that the schema does not know, and required ones that `value` lacks."""
    if "$ref" in schema:
        schema = root["$defs"][schema["$ref"].rsplit("/", 1)[1]]
    if isinstance(value, dict) and "properties" in schema:
        properties = schema["properties"]
        wrong = [f"{where}.{name}" for name in value.keys() ^ properties.keys()]
        known = value.keys() & properties.keys()
        return wrong + [p for n in known for p in undocumented(value[n], properties[n], root, f"{where}.{n}")]
    if isinstance(value, list | tuple) and "items" in schema:
        return [p for item in value for p in undocumented(item, schema["items"], root, f"{where}[]")]
    return []


def test_the_control_for_the_schema_walk_finds_a_stray_field_and_a_missing_one():
    schema = json_schema()
    value = sample_verdict({1: 1.0}).to_json()
    value["curve"][0]["stray"] = 1
    del value["artifact"]["name"]
    assert sorted(undocumented(value, schema, schema)) == ["$.artifact.name", "$.curve[].stray"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda value: value.pop("artifact"), "artifact"),
        (lambda value: value["curve"][0].update(status="splendid"), "curve.0.status"),
        (lambda value: value.update(schema_version=99), "schema version 99"),
        (lambda value: value["bounds"].update(surprise=1), "bounds.surprise"),
    ],
)
def test_a_verdict_of_another_form_is_refused_by_name(tmp_path: Path, change, message: str):
    value = json.loads(json.dumps(sample_verdict({1: 1.0}).to_json()))
    change(value)
    path = tmp_path / "serving_check.json"
    path.write_text(json.dumps(value), encoding="utf-8")
    with pytest.raises(UserError, match=message):
        parse_verdict(path)


def test_what_is_no_json_and_what_is_not_there_are_refused(tmp_path: Path):
    with pytest.raises(UserError, match="pipeline validate"):
        parse_verdict(tmp_path / "serving_check.json")
    (tmp_path / "serving_check.json").write_text("{", encoding="utf-8")
    with pytest.raises(UserError, match="not valid JSON"):
        parse_verdict(tmp_path / "serving_check.json")


def check(status: str) -> CheckResult:
    return CheckResult("a check", status, "measured", "bound", "reason")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("statuses", "overall", "exit_status"),
    [
        (["pass", "pass"], "pass", 0),
        (["pass", "inconclusive", "fail"], "fail", 1),
        (["pass", "inconclusive"], "inconclusive", 2),
        ([], "inconclusive", 2),
    ],
)
def test_only_all_passes_are_a_pass(statuses, overall, exit_status):
    checks = [check(status) for status in statuses]
    assert overall_status(checks) == overall
    verdict = replace(sample_verdict({1: 1.0}), status=overall)
    assert verdict.exit_status == exit_status


def test_a_recipe_changes_the_bounds_it_names_and_no_others():
    bounds = Bounds.from_recipe({"format": "int4", "throughput_floor": 0.8})
    assert bounds == replace(Bounds(), throughput_floor=0.8)
    with pytest.raises(UserError, match="throughput_floor"):
        Bounds.from_recipe({"throughput_floor": "fast"})


@pytest.mark.parametrize("settings", [{"ms": (0, 1)}, {"ms": ()}, {"ms": (4, 4)}, {"output_len": 0}])
def test_a_load_that_makes_no_sense_is_refused(settings):
    with pytest.raises(UserError):
        WorkloadSettings(**settings)


if __name__ == "__main__":
    SCHEMA_PATH.write_text(json.dumps(json_schema(), indent=2) + "\n", encoding="utf-8")
