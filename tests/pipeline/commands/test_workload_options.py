"""An option of the workload is said once, and is then on command lines, in signatures and in records."""

import inspect
import json
import subprocess
import sys
from dataclasses import replace

import click
import pytest
import scalegate
from click.testing import CliRunner
from scalegate.base.errors import UserError
from scalegate.base.option_fields import flag, from_given, name_of, options_of, values_of, words_of
from scalegate.pipeline.cli import adopt, quantize, release, validate
from scalegate.pipeline.commands.release_request import GROUPS
from scalegate.pipeline.quantization.options import BudgetOptions, QuantizeOptions
from scalegate.pipeline.validation.options import ValidateOptions, asked_bounds, asked_workload
from scalegate.serving_check.adapters.placement import Placement
from scalegate.serving_check.engine.options import EngineOptions
from scalegate.serving_check.settings import Bounds, WorkloadSettings

from ...serving_check.gate_samples import sample_verdict

VALIDATE = (ValidateOptions, WorkloadSettings, Bounds, EngineOptions, Placement)
COMMANDS = {
    "validate": (validate.command, VALIDATE),
    "release": (release.command, GROUPS),
    "quantize": (quantize.command, (QuantizeOptions, BudgetOptions)),
}

ANOTHER_OPTION = """
import inspect, json, sys
from dataclasses import dataclass, replace
from pathlib import Path
from scalegate.base.option_fields import option
from scalegate.serving_check import settings

@dataclass(frozen=True)
class WorkloadSettings(settings.WorkloadSettings):
    sprockets: int = option(3, "How many sprockets turn.", minimum=1)

if "--without" not in sys.argv:
    settings.WorkloadSettings = WorkloadSettings

import click
import scalegate
from scalegate.pipeline.cli import release, validate
from scalegate.pipeline.commands.release_preview import preview_release
from scalegate.pipeline.commands.validate import prepare
from scalegate.pipeline.publishing.reproduce import _given_settings
from scalegate.pipeline.records.artifact import Artifact
from pydantic import TypeAdapter
from scalegate.serving_check.evidence.verdict import Verdict

checkpoint, recorded = sys.argv[1:3]
found = {}
for name, module in (("validate", validate), ("release", release)):
    found[name] = "--sprockets" in module.command.get_help(click.Context(module.command))
    found[name + "()"] = "sprockets" in inspect.signature(getattr(scalegate, name)).parameters
    found["help of " + name + "()"] = "How many sprockets turn." in getattr(scalegate, name).__doc__
found["preview_release()"] = "sprockets" in inspect.signature(preview_release).parameters
try:
    words = [checkpoint, "--baseline", checkpoint, "--sprockets", "5", "--device", "cpu"]
    given = validate.command.make_context("validate", words).params
except click.UsageError:
    given = {"baseline": checkpoint, "device": "cpu"}
run = prepare(checkpoint, given, None, progress=False)
found["workload"] = getattr(run.workload, "sprockets", None) == 5
found["recorded command"] = "--sprockets 5" in run.command
old = Verdict.from_json(json.loads(Path(recorded).read_text()))
verdict = replace(old, workload=run.workload)
found["verdict"] = verdict.to_json()["workload"].get("sprockets") == 5
again = Verdict.from_json(json.loads(json.dumps(verdict.to_json())))
found["verdict that is read"] = getattr(again.workload, "sprockets", None) == 5
found["older verdict"] = getattr(old.workload, "sprockets", None) == 3
described = TypeAdapter(Verdict).json_schema()["$defs"]["WorkloadSettings"]["properties"].get("sprockets", {})
found["schema"] = described.get("description") == "How many sprockets turn."
artifact = Artifact("model", None, {"name": "int4-hqq"}, {}, {})
found["card"] = "--sprockets 5" in " ".join(_given_settings(artifact, verdict))
print(json.dumps(found))
"""


@pytest.mark.parametrize(
    "without",
    [pytest.param([], id="added"), pytest.param(["--without"], id="not added", marks=pytest.mark.exhaustive)],
)
def test_an_option_that_is_added_to_the_workload_is_everywhere(example_checkpoint, tmp_path, without):
    recorded = tmp_path / "verdict.json"
    recorded.write_text(json.dumps(sample_verdict({1: 1.0}).to_json()))
    command = [sys.executable, "-P", "-c", ANOTHER_OPTION, str(example_checkpoint), str(recorded), *without]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert len(found) == 14 and set(found.values()) == {not without}, found


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_line_and_signature_has_every_option_with_its_help(name: str):
    command, groups = COMMANDS[name]
    wide = {"terminal_width": 400, "max_content_width": 400}
    text = " ".join(CliRunner().invoke(command, ["--help"], **wide).output.split())
    function = getattr(scalegate, name)
    for cls in groups:
        for field in options_of(cls):
            assert f" {flag(name_of(field))} " in text
            words = field.metadata["help"].partition("; by default")[0].rstrip(".")
            assert words in text and words in function.__doc__
            assert name_of(field) in inspect.signature(function).parameters


def test_an_option_of_two_commands_is_the_same_on_both():
    def shown(command: click.Command) -> list[str]:
        [option] = [each for each in command.params if each.name == "baseline_revision"]
        assert isinstance(option, click.Option)
        return [*option.opts, str(option.help)]

    assert shown(adopt.command) == shown(validate.command) == shown(release.command)


def test_words_of_a_command_line_give_the_same_workload_and_bounds():
    workload = WorkloadSettings((1, 8), 32, 48, 2, 12, 3, 7)
    bounds = Bounds(throughput_floor=0.875, max_first_rival_m=16.0)
    words = words_of(values_of(workload) | values_of(bounds))
    given = validate.command.make_context("validate", ["model", *words]).params
    assert asked_workload(given, input_len=1, seed=1) == replace(workload, draws_between=True)
    assert asked_bounds({}, given) == bounds


def test_what_is_not_given_follows_from_the_recipe_and_the_prompts():
    given = validate.command.make_context("validate", ["model", "--input-len", "4096"]).params
    workload = asked_workload(given, input_len=64, seed=5)
    assert (workload.ms, workload.input_len, workload.seed) == ((1, 8, 32), 4096, 5)
    assert workload.draws_between
    assert asked_bounds({"throughput_floor": 0.5}, given).throughput_floor == 0.5
    assert asked_bounds({"throughput_floor": 0.5}, {"floor": 0.75}).throughput_floor == 0.75


def test_a_profile_is_the_recipes_unless_one_is_given():
    assert asked_workload({}, input_len=64, seed=0).profile is None
    assert asked_workload({}, input_len=64, seed=0, profile="chat").profile == "chat"
    assert asked_workload({"profile": "rag"}, input_len=64, seed=0, profile="chat").profile == "rag"
    with pytest.raises(UserError, match=r"profile.*chat, rag, code"):
        asked_workload({"profile": "mail"}, input_len=64, seed=0)


def test_a_name_that_an_option_had_is_refused_with_the_one_that_it_has(tmp_path):
    for former, name in (("max_repeats", "max_blocks"), ("eval", "tasks")):
        with pytest.raises(UserError, match=f"{former} is called {name} now"):
            scalegate.validate(tmp_path, **{former: 1})
        for command in (validate.command, release.command):
            words = ["model", flag(former), "1"] + ["--to", "folder:x"] * (command is release.command)
            result = CliRunner().invoke(command, words)
            assert result.exit_code == 2 and f"{flag(former)} is called {flag(name)} now" in result.output
            assert flag(former) not in CliRunner().invoke(command, ["--help"]).output


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("m", (0,), "m is .*; it must be distinct whole numbers, ascending, at least 1"),
        ("m", (1, 1), "distinct whole numbers"),
        ("m", (), "distinct whole numbers"),
        ("output_len", 0, "output_len is 0; it must be a whole number, at least 1"),
        ("warmups", -1, "at least 0"),
        ("quality_tokens", 100, "at least 1024"),
    ],
)
def test_a_value_that_cannot_be_is_refused_in_python_and_on_the_command_line(name, value, message):
    with pytest.raises(UserError, match=message):
        from_given(ValidateOptions, {name: value})
        asked_workload({name: value}, input_len=64, seed=0)
    words = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
    result = CliRunner().invoke(validate.command, ["model", flag(name), words])
    assert result.exit_code == 2 and flag(name) in result.output


def test_ms_come_in_any_order():
    assert WorkloadSettings((8, 1, 2)).ms == (1, 2, 8)
