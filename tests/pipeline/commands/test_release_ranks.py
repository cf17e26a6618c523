"""`pipeline release --devices`: a process a device makes the weights, as `quantize --devices` does."""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from scalegate.base.errors import UserError
from scalegate.base.option_fields import parse
from scalegate.pipeline.commands import release as stages
from scalegate.pipeline.commands import release_preview, release_request
from scalegate.pipeline.commands.quantize import quantize
from scalegate.pipeline.commands.standing_verdict import changed_options
from scalegate.pipeline.quantization.shards import launch
from scalegate.pipeline.quantization.shards.ranks import OtherRankFailed
from scalegate.pipeline.records.recipe_file import load_recipe
from scalegate.pipeline.validation.servers import effective_options, sized_options
from scalegate.serving_check.adapters.placement import Placement, gpus_here

from ...serving_check.gate_samples import sample_verdict

pytestmark = pytest.mark.long

SHARD = 300_000
RANK = f"""
import os, signal
from scalegate.pipeline.cli.main import main
from scalegate.pipeline.quantization import write_shards
from scalegate.pipeline.commands.quantize import quantize

quantize.__wrapped__.__kwdefaults__["max_shard_bytes"] = {SHARD}
carry_out, wrote = write_shards._carry_out, set()

def until_killed(job, task, known, writer):
    wrote.add(writer.path)
    if os.environ.get("KILLED") == os.environ["RANK"] and len(wrote) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return carry_out(job, task, known, writer)

write_shards._carry_out = until_killed
main(prog_name="pipeline")
"""


@pytest.fixture
def on_two(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """A release on two CPU processes that goes no further than its weights; the words of every launch."""
    monkeypatch.setattr(release_request.ReleaseRequest, "devices", property(lambda self: ["cpu", "cpu"]))
    monkeypatch.setattr(stages, "_lay_out", lambda *given: None)
    monkeypatch.setattr(
        stages, "_validate", lambda *given: SimpleNamespace(status="fail", speed_not_judged=None)
    )
    monkeypatch.setattr(launch, "PIPELINE", (sys.executable, "-P", "-c", RANK))
    monkeypatch.setitem(quantize.__wrapped__.__kwdefaults__, "max_shard_bytes", SHARD)
    launched: list[list[str]] = []
    run_on = launch.run_on

    def counted(devices, words, silent=False):
        launched.append(list(words))
        return run_on(devices, words, silent)

    monkeypatch.setattr(stages, "run_on", counted)
    return launched


def released(model: Path, work: Path) -> Path:
    return stages.release(str(model), "nvfp4", f"folder:{work}/out", work=work, progress=False).artifact


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.exhaustive
def test_two_processes_make_the_bytes_of_one_also_after_one_was_killed(
    on_two, example_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd
):
    monkeypatch.setenv("KILLED", "1")
    with pytest.raises(OtherRankFailed) as failed:
        released(example_checkpoint, tmp_path)
    assert failed.value.exit_code == 70
    assert "process 1 on cpu was ended by SIGKILL" in capfd.readouterr().err
    [folder] = [path.parent for path in tmp_path.glob("*/*.safetensors")][:1]
    kept = {path.name: path.stat().st_ino for path in folder.glob("*.safetensors")}
    assert not (folder / "scalegate.json").exists()
    monkeypatch.delenv("KILLED")
    assert released(example_checkpoint, tmp_path) == folder
    assert kept.items() <= {path.name: path.stat().st_ino for path in folder.iterdir()}.items()
    assert capfd.readouterr().out == "", "what --json prints is the release's alone"
    quantize(example_checkpoint, "nvfp4", tmp_path / "alone", device="cpu", progress=False)
    assert contents(folder) == contents(tmp_path / "alone") and len(contents(folder)) > 5
    assert len(on_two) == 2
    released(example_checkpoint, tmp_path)
    assert len(on_two) == 2, "what is finished starts nobody"


def test_gpus_that_are_not_there_are_refused_before_anything_is_made(
    example_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(UserError, match="PyTorch finds no GPU here"):
        stages.release(str(example_checkpoint), "nvfp4", "folder:out", work=tmp_path, devices=(0, 1))
    assert not list(tmp_path.iterdir())


def test_all_is_every_gpu_and_servers_take_as_many_as_they_can_use(monkeypatch: pytest.MonkeyPatch):
    field = Placement.__dataclass_fields__["devices"]
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    assert gpus_here() == 4 and parse(Placement, field, "all") == (0, 1, 2, 3)
    assert Placement((0, 1, 2, 3)).for_servers(2).devices == (0, 1)
    assert Placement((0, 1, 2, 3), 2).for_servers(2).devices == (0, 1, 2, 3)
    assert Placement((0, 1, 2, 3), 2).for_servers(3).devices == (0, 1)
    assert Placement((3,), 2).for_servers(2).devices == (3,), "too few are for `groups` to refuse"
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(UserError, match="--devices all: this machine has no GPU"):
        parse(Placement, field, "all")


@pytest.mark.parametrize(
    ("recorded", "asked", "stands"),
    [
        ({"devices": [0, 1]}, (0, 1), True),
        ({"devices": [0, 1]}, (0, 1, 2, 3), True),
        ({"devices": [0, 1]}, (2, 3), False),
        ({"devices": [0, 1]}, None, False),
        ({}, (0, 1), False),
        ({}, None, True),
    ],
)
def test_a_pass_stands_for_the_gpus_that_its_servers_ran_on(
    recorded: dict[str, list[int]], asked: tuple[int, ...] | None, stands: bool
):
    given = release_request.read_request({}, load_recipe("nvfp4"))
    given = replace(given, placement=Placement(asked))
    served = effective_options(sized_options({}, given.workload))
    verdict = sample_verdict({1: 1.0})
    environment = replace(verdict.environment, engine_options=served | recorded)
    verdict = replace(verdict, environment=environment)
    assert changed_options(verdict, given) == ([] if stands else ["devices"])


def test_a_dry_run_looks_at_the_first_gpu_that_is_named(
    example_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    asked: list[str | None] = []

    def stop(*given: object, device: str | None, **options: object):
        asked.append(device)
        raise UserError("far enough")

    monkeypatch.setattr(release_preview, "preview", stop)
    monkeypatch.setattr(release_request, "gpu_name", lambda index: "a GPU")
    monkeypatch.setattr(release_request, "placed", lambda device, placement: None)
    # Whether the engine serves it there is another question, which needs the GPU.
    monkeypatch.setattr(release_preview, "refuse_unserved_source", lambda source, request: None)
    for devices in ((2, 3), None):
        with pytest.raises(UserError, match="far enough"):
            release_preview.preview_release(
                str(example_checkpoint), "nvfp4", f"folder:{tmp_path}/out", work=tmp_path, devices=devices
            )
    assert asked == ["cuda:2", None]
