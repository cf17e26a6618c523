"""`pipeline doctor` describes this machine without a request, and gives a reason for everything it lacks."""

import json
import socket
from importlib.metadata import version

import pytest
import torch
from click.testing import CliRunner
from scalegate.layouts.formats.all_formats import WEIGHT_FORMATS
from scalegate.layouts.packing.all_layouts import LAYOUTS
from scalegate.pipeline.cli.doctor import command
from scalegate.pipeline.commands import doctor as doctor_module
from scalegate.pipeline.commands.doctor import doctor


def test_every_layout_is_there_for_every_device_with_a_reason_where_refused():
    diagnosis = doctor()
    devices = 1 + torch.cuda.device_count()
    assert len(diagnosis.devices) == devices
    assert {state.layout for state in diagnosis.layouts} == set(LAYOUTS)
    assert all(state.refusal is None or state.refusal.strip() for state in diagnosis.layouts)
    always = [state for state in diagnosis.layouts if state.layout == "dequantize"]
    refused = [state.problem for state in always if state.refusal is not None]
    assert refused == ["unquantized"] * devices
    specs = [spec for _, weight_format in WEIGHT_FORMATS.items() for spec in weight_format.variants()]
    assert {state.problem for state in diagnosis.layouts} == {spec.key for spec in specs}


def test_no_request_is_sent(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("doctor opened a connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert doctor().engines[0].available


@pytest.mark.parametrize("token", [None, "hf_something"])
def test_the_hub_login_is_told_without_telling_the_token(monkeypatch, token):
    monkeypatch.setattr(doctor_module, "get_token", lambda: token)
    output = CliRunner().invoke(command, []).output
    assert "hf_something" not in output
    assert ("no token" in output) == (token is None)
    assert ("hf auth login" in output) == (token is None)


def test_json_and_text_agree():
    value = json.loads(CliRunner().invoke(command, ["--json"]).output)
    text = CliRunner().invoke(command, []).output
    # Not `torch.__version__`: of a build for CUDA from PyPI that alone has a local label, such as `+cu132`.
    assert value["versions"]["torch"] == version("torch") and version("torch") in text
    for state in value["layouts"]:
        assert state["refusal"] is None or state["refusal"] in text


def test_what_is_missing_comes_with_how_to_get_it(monkeypatch):
    monkeypatch.setattr(doctor_module.shutil, "which", lambda name: None)
    assert any("pip install vllm" in line for line in doctor().advice)
