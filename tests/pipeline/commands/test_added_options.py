"""A field that is added to the engine's or the workload's options is everywhere without another line.

Its process imports everything anew, which takes seconds: so one process has a field of each.
"""

import json
import subprocess
import sys

import pytest

from ...serving_check.gate_samples import sample_verdict

ANOTHER_OPTION = """
import inspect, json, sys
from dataclasses import dataclass, replace
from pathlib import Path
from scalegate.base.option_fields import option
from scalegate.serving_check import settings
from scalegate.serving_check.engine import options

@dataclass(frozen=True)
class EngineOptions(options.EngineOptions):
    sprockets: int = option(3, "How many sprockets turn.", minimum=1)

@dataclass(frozen=True)
class WorkloadSettings(settings.WorkloadSettings):
    gears: int = option(3, "How many gears mesh.", minimum=1)

if "--without" not in sys.argv:
    options.EngineOptions = EngineOptions
    settings.WorkloadSettings = WorkloadSettings

import click
import scalegate
from pydantic import TypeAdapter
from scalegate.pipeline.checkpoints.checkpoint import open_checkpoint
from scalegate.pipeline.cli import release, serve, validate
from scalegate.pipeline.commands.release_preview import preview_release
from scalegate.pipeline.commands.validate import prepare
from scalegate.pipeline.publishing.reproduce import _given_settings
from scalegate.pipeline.records.artifact import Artifact
from scalegate.pipeline.validation.servers import recorded_options, server_of, sized_options
from scalegate.serving_check.adapters.engine import ServerJob
from scalegate.serving_check.evidence.verdict import Verdict

checkpoint, recorded = sys.argv[1:3]
folder = Path(checkpoint)
found = {}
sized = sized_options({"device": "cpu"}, settings.WorkloadSettings())
server = server_of(ServerJob("embedded", "artifact", folder, sized, folder / "artifact.log"))
found["child"] = "--sprockets 3" in " ".join(server.command)
found["engine in a verdict"] = "sprockets" in recorded_options(
    "embedded", open_checkpoint(folder), sized, "float32"
)
found["LLM()"] = "sprockets" in inspect.signature(scalegate.LLM).parameters
for name, module in (("serve", serve), ("validate", validate), ("release", release)):
    help_text = module.command.get_help(click.Context(module.command))
    function = getattr(scalegate, name)
    for option_name in ("sprockets", "gears") if name != "serve" else ("sprockets",):
        found[f"{name} --{option_name}"] = f"--{option_name}" in help_text
        found[f"{name}({option_name}=)"] = option_name in inspect.signature(function).parameters
    if name != "serve":
        found[f"help of {name}()"] = "How many gears mesh." in function.__doc__
found["preview_release()"] = "gears" in inspect.signature(preview_release).parameters
try:
    words = [checkpoint, "--baseline", checkpoint, "--gears", "5", "--device", "cpu"]
    given = validate.command.make_context("validate", words).params
except click.UsageError:
    given = {"baseline": checkpoint, "device": "cpu"}
run = prepare(checkpoint, given, None, progress=False)
found["workload"] = getattr(run.workload, "gears", None) == 5
found["recorded command"] = "--gears 5" in run.command
old = Verdict.from_json(json.loads(Path(recorded).read_text()))
verdict = replace(old, workload=run.workload)
found["verdict"] = verdict.to_json()["workload"].get("gears") == 5
again = Verdict.from_json(json.loads(json.dumps(verdict.to_json())))
found["verdict that is read"] = getattr(again.workload, "gears", None) == 5
found["older verdict"] = getattr(old.workload, "gears", None) == 3
described = TypeAdapter(Verdict).json_schema()["$defs"]["WorkloadSettings"]["properties"].get("gears", {})
found["schema"] = described.get("description") == "How many gears mesh."
artifact = Artifact("model", None, {"name": "int4-hqq"}, {}, {})
found["card"] = "--gears 5" in " ".join(_given_settings(artifact, verdict))
print(json.dumps(found))
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("without", [[], ["--without"]], ids=["added", "not added"])
def test_an_option_that_is_added_to_a_dataclass_is_everywhere(example_checkpoint, tmp_path, without):
    recorded = tmp_path / "verdict.json"
    recorded.write_text(json.dumps(sample_verdict({1: 1.0}).to_json()))
    command = [sys.executable, "-P", "-c", ANOTHER_OPTION, str(example_checkpoint), str(recorded), *without]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert len(found) == 23 and set(found.values()) == {not without}, found
