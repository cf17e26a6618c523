"""What is added to a registry is on the command line, in `doctor` and in the errors without another line."""

import importlib
import json
from contextlib import ExitStack
from dataclasses import replace

import pytest
from click.testing import CliRunner
from scalegate.base.errors import UserError
from scalegate.base.registry import Registry
from scalegate.layouts.kv.format import KV_FORMATS
from scalegate.layouts.packing.all_layouts import LAYOUTS
from scalegate.layouts.states.all_states import STATE_FORMATS
from scalegate.pipeline.cli.main import main
from scalegate.pipeline.conventions.all_conventions import CONVENTIONS, EXPORTS
from scalegate.pipeline.records.engine_commands import engines
from scalegate.pipeline.validation.servers import sized_options
from scalegate.serving_check.adapters.all_engines import ENGINES, engine_named
from scalegate.serving_check.adapters.engine import CardCommand
from scalegate.serving_check.settings import WorkloadSettings
from scalegate.tests.registered import registered as registered_entry

NAME = "one_more"
REGISTRIES = {
    "layout": LAYOUTS,
    "KV format": KV_FORMATS,
    "state format": STATE_FORMATS,
    "engine": ENGINES,
    "convention": CONVENTIONS,
    "export": EXPORTS,
}
IN_HELP = {
    "layout": ["serve", "validate", "release"],
    "KV format": ["serve", "validate", "release"],
    "engine": ["validate", "release"],
    "export": ["release"],
}
ON_SCREEN = ["KV format", "engine"]
"""What `doctor` lists without being asked for more."""


def one_more(kind: str):
    """An entry like the first one there is."""
    entry = next(entry for _, entry in REGISTRIES[kind].items())
    if kind == "engine":
        return replace(entry, name=NAME, card_command=lambda model, method: CardCommand(NAME, "sh", model))
    return entry


@pytest.fixture(params=[True, False], ids=["registered", "not registered"])
def registered(request: pytest.FixtureRequest):
    with ExitStack() as stack:
        for kind, registry in REGISTRIES.items() if request.param else ():
            stack.enter_context(registered_entry(registry, NAME, one_more(kind)))
        yield request.param


@pytest.mark.parametrize("command", ["serve", "validate", "release"])
def test_it_is_a_choice_in_the_help(registered: bool, command: str):
    text = CliRunner().invoke(main, [command, "--help"]).output
    expected = sum(command in commands for commands in IN_HELP.values())
    # A validation has two engines, and a third may read the artifact too.
    expected += 2 * (command in ("validate", "release"))
    assert text.count(NAME) == (expected if registered else 0)


def test_doctor_says_what_it_is_here(registered: bool):
    found = json.loads(CliRunner().invoke(main, ["doctor", "--json"]).output)
    names = {
        "layout": {state["layout"] for state in found["layouts"]},
        "KV format": set(found["kv_formats"]),
        "state format": set(found["state_formats"]),
        "engine": {engine["name"] for engine in found["engines"]},
        "convention": set(found["conventions"]),
    }
    assert {kind for kind in names if NAME in names[kind]} == (set(names) if registered else set())
    screen = CliRunner().invoke(main, ["doctor"]).output
    assert len([line for line in screen.splitlines() if NAME in line]) == (
        len(ON_SCREEN) if registered else 0
    )


@pytest.mark.parametrize("kind", REGISTRIES)
def test_the_error_for_another_name_lists_it(registered: bool, kind: str):
    with pytest.raises(UserError, match="choose one of") as refused:
        _ = REGISTRIES[kind]["another"]
    assert (NAME in refused.value.message) == registered


def test_options_take_it_as_a_value(registered: bool):
    given = {"layout": NAME, "kv_cache_dtype": NAME}
    if registered:
        assert sized_options(given, WorkloadSettings()).kv_format == NAME
        assert engine_named(NAME).name == NAME
    else:
        with pytest.raises(UserError, match=f"unknown layout '{NAME}'"):
            sized_options(given, WorkloadSettings())
        with pytest.raises(UserError, match=f"unknown engine '{NAME}'.*embedded, vllm, sglang, URL"):
            engine_named(NAME)


def test_a_card_shows_how_an_engine_serves_the_release(registered: bool):
    titles = [command.title for command in engines("org/model", "compressed-tensors")]
    assert (NAME in titles) == registered


def test_there_is_no_registry_that_this_file_forgets():
    modules = ["layouts.packing.all_layouts", "layouts.kv.format", "pipeline.conventions.all_conventions"]
    modules += ["serving_check.adapters.all_engines", "layouts.states.all_states"]
    found = [
        value
        for module in modules
        for value in vars(importlib.import_module(f"scalegate.{module}")).values()
        if isinstance(value, Registry)
    ]
    assert {id(registry) for registry in found} == {id(registry) for registry in REGISTRIES.values()}
