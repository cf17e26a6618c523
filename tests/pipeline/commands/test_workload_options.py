"""An option of the workload is said once, and is then on command lines, in signatures and in records."""

import inspect
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

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

ROOT = Path(scalegate.__file__).resolve().parent
WITH_PAUSES = """
import inspect
import scalegate
from scalegate.base.option_fields import values_of, words_of
from scalegate.pipeline.cli import release, validate
from scalegate.pipeline.validation.options import asked_workload

for name, command in (("validate", validate.command), ("release", release.command)):
    [option] = [each for each in command.params if "--pauses" in each.opts]
    parameters = inspect.signature(getattr(scalegate, name)).parameters
    if "Pauses between two repeats" in option.help and "pauses" in parameters:
        print(name)
workload = asked_workload({"pauses": 5}, input_len=64, seed=0)
words = words_of(values_of(workload))
print(workload.pauses, "--pauses", words[words.index("--pauses") + 1])
"""
"""What a process says whose package has one more option of the workload."""

VALIDATE = (ValidateOptions, WorkloadSettings, Bounds, EngineOptions, Placement)
COMMANDS = {
    "validate": (validate.command, VALIDATE),
    "release": (release.command, GROUPS),
    "quantize": (quantize.command, (QuantizeOptions, BudgetOptions)),
}


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


@pytest.mark.exhaustive
def test_a_new_option_of_the_workload_touches_one_file(tmp_path):
    """A copy of the package whose settings.py has one more field; every other file is the same."""
    package = tmp_path / "scalegate"
    (package / "serving_check").mkdir(parents=True)
    for folder, copy in ((ROOT, package), (ROOT / "serving_check", package / "serving_check")):
        for path in folder.iterdir():
            if not path.name.startswith(".") and path.name not in ("serving_check", "settings.py"):
                (copy / path.name).symlink_to(path)
    source = (ROOT / "serving_check" / "settings.py").read_text(encoding="utf-8")
    begin = source.index("class WorkloadSettings")
    place = source.index("    profile: ", begin)
    field = '    pauses: int = option(3, "Pauses between two repeats.", minimum=0)\n'
    (package / "serving_check" / "settings.py").write_text(source[:place] + field + source[place:])
    told = subprocess.run(
        [sys.executable, "-P", "-c", WITH_PAUSES], env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert told.stdout.split() == ["validate", "release", "5", "--pauses", "5"], told.stderr
