"""Interrupted quantizing: taken up where it stopped, byte-identical in the end, and never mixed up."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from itertools import product
from pathlib import Path

import pytest
from scalegate.base.errors import UserError
from scalegate.layouts.formats.int4 import Int4
from scalegate.pipeline.commands.quantize import quantize
from scalegate.pipeline.quantization import write_shards as module
from scalegate.pipeline.quantization.calibration.calibrated_layer import layer_path
from scalegate.pipeline.quantization.shards.work_record import (
    CALIBRATION_FOLDER,
    FINISHED_SUFFIX,
    LOCK_NAME,
    PARTS_FOLDER,
    RECORD_NAME,
    locked_folder,
)
from scalegate.pipeline.records.recipe import Recipe
from scalegate.pipeline.records.recipe_fields import GPTQ
from scalegate.tests.bench.quantization import resume
from scalegate.tests.exhaustive import exhaustive_but

RECIPE = Recipe("test", spec=Int4(128))
SHARD_BYTES = 300_000


class PowerCut(BaseException):
    """What stops a job between two writes, where nothing can catch it."""


@pytest.fixture
def interrupted(two_layers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which a job stopped in its third shard."""
    out = tmp_path / "out"
    original = module._carry_out

    def until_the_third(job, step, shared, writer):
        if writer.path.name.startswith("model-00003"):
            raise PowerCut
        return original(job, step, shared, writer)

    with monkeypatch.context() as patch:
        patch.setattr(module, "_carry_out", until_the_third)
        with pytest.raises(PowerCut):
            quantize(two_layers, RECIPE, out, max_shard_bytes=SHARD_BYTES, progress=False)
    return out


def go_on(source: Path, out: Path, recipe: Recipe = RECIPE, **options: bool | Path) -> None:
    quantize(source, recipe, out, max_shard_bytes=SHARD_BYTES, progress=False, **options)  # type: ignore[arg-type]


@pytest.mark.exhaustive
def test_killed_three_times_the_artifact_is_the_same(two_layers: Path, tmp_path: Path) -> None:
    asked = {"recipe": "int4-hqq", "max_shard_bytes": SHARD_BYTES}
    result = resume.kill_and_resume(two_layers, asked, 3, 1, tmp_path)
    assert len(result["kills"]) == 3
    assert result["shards"] > 3
    assert result["differing"] == []
    assert result["redone"] == []


@pytest.mark.exhaustive
def test_killed_while_it_calibrates_the_artifact_is_the_same(
    two_layers: Path, heldout_text: Path, tmp_path: Path
) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "killed"
    text.write_text(json.loads(heldout_text.read_text().splitlines()[0])["text"])
    recipe = Recipe("keys", spec=Int4(128), method=GPTQ, include=("*.k_proj",))
    asked = {"recipe": recipe, "calibration": text, "max_shard_bytes": SHARD_BYTES}
    child = resume.start(two_layers, asked, out)
    first = layer_path(out / CALIBRATION_FOLDER, 0)
    while child.is_alive() and not first.is_file():
        time.sleep(0.005)
    child.kill()
    child.join()
    assert not (out / "scalegate.json").exists(), "it was over before it was killed"
    finished = resume.finished_files(out)
    go_on(two_layers, out, recipe, calibration=text)
    go_on(two_layers, tmp_path / "whole", recipe, calibration=text)
    assert first.name in finished
    assert resume.differing_files(tmp_path / "whole", out) == []


def test_an_unfinished_folder_does_not_pass_for_an_artifact(interrupted: Path) -> None:
    assert not (interrupted / "scalegate.json").exists()
    assert not (interrupted / "config.json").exists()
    assert (interrupted / RECORD_NAME).is_file()
    finished = list((interrupted / PARTS_FOLDER).glob(f"*{FINISHED_SUFFIX}"))
    assert len(finished) == len(list(interrupted.glob("*.safetensors"))) == 2


def test_finished_shards_stay_and_half_written_ones_go(
    interrupted: Path, two_layers: Path, tmp_path: Path
) -> None:
    leftover = interrupted / "model-00003-of-00007.safetensors.partial"
    leftover.write_bytes(b"half of a shard")
    before = resume.shards_on_disk(interrupted)
    go_on(two_layers, interrupted)
    after = resume.shards_on_disk(interrupted)
    assert before.items() <= after.items()
    assert not leftover.exists()
    go_on(two_layers, tmp_path / "whole")
    assert resume.differing_files(tmp_path / "whole", interrupted) == []


@pytest.mark.parametrize(
    ("suffix", "is_renamed"),
    exhaustive_but(
        product([".safetensors", FINISHED_SUFFIX], [False, True]),
        (".safetensors", True), (FINISHED_SUFFIX, False),
    ),
)  # fmt: skip
def test_stopped_beside_a_rename_no_shard_on_disk_is_made_again(
    suffix: str,
    is_renamed: bool,
    two_layers: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out, rename, renamed = tmp_path / "out", os.replace, []

    def until_the_second(partial: Path, path: Path) -> None:
        renamed.extend([path] if path.name.endswith(suffix) else [])
        if len(renamed) < 2 or is_renamed:
            rename(partial, path)
        if len(renamed) == 2:
            raise PowerCut

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", until_the_second)
        with pytest.raises(PowerCut):
            go_on(two_layers, out)
    before = resume.shards_on_disk(out)
    assert len(before) == (2 if is_renamed and suffix == ".safetensors" else 1)
    go_on(two_layers, out)
    assert before.items() <= resume.shards_on_disk(out).items()
    go_on(two_layers, tmp_path / "whole")
    assert resume.differing_files(tmp_path / "whole", out) == []


def test_a_finished_shard_that_changed_is_made_again_and_named(
    interrupted: Path, two_layers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (shard, other) = sorted(interrupted.glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    kept = other.stat().st_ino
    quantize(two_layers, RECIPE, interrupted, max_shard_bytes=SHARD_BYTES, progress=True)
    assert f"made again, since not on disk as recorded: {shard.name}\n" in capsys.readouterr().err
    assert other.stat().st_ino == kept
    go_on(two_layers, tmp_path / "whole")
    assert resume.differing_files(tmp_path / "whole", interrupted) == []


def test_other_parameters_are_refused_by_name(interrupted: Path, two_layers: Path) -> None:
    with pytest.raises(UserError, match="made with another recipe; add --overwrite"):
        go_on(two_layers, interrupted, Recipe("test", spec=Int4(64)))
    with pytest.raises(UserError, match="another shard size"):
        quantize(two_layers, RECIPE, interrupted, max_shard_bytes=2 * SHARD_BYTES, progress=False)
    go_on(two_layers, interrupted, Recipe("test", spec=Int4(64)), overwrite=True)


def test_a_source_that_changed_meanwhile_is_refused(
    interrupted: Path, two_layers: Path, tmp_path: Path
) -> None:
    source = Path(shutil.copytree(two_layers, tmp_path / "source"))
    record = json.loads((interrupted / RECORD_NAME).read_text())
    record["parameters"]["source"]["name"] = str(source)
    (interrupted / RECORD_NAME).write_text(json.dumps(record))
    with open(source / "model.safetensors", "r+b") as file:
        file.seek(-2, 2)
        file.write(b"\x00")
    with pytest.raises(UserError, match="made with another source"):
        go_on(source, interrupted)


def test_an_unreadable_record_is_refused(interrupted: Path, two_layers: Path) -> None:
    (interrupted / RECORD_NAME).write_text("{")
    with pytest.raises(UserError, match="not readable as a work record"):
        go_on(two_layers, interrupted)


@pytest.mark.parametrize("content", ["{", '{"file": {"size": -1}, "modules": {}}'])
def test_an_unreadable_part_of_the_record_is_refused(
    interrupted: Path, two_layers: Path, content: str
) -> None:
    part = next((interrupted / PARTS_FOLDER).glob(f"*{FINISHED_SUFFIX}"))
    part.write_text(content)
    with pytest.raises(UserError, match=r"finished.json is not readable as a work record"):
        go_on(two_layers, interrupted)


KILLED_WITH_THE_LOCK = """
import os, signal, sys
from filelock import FileLock

lock = FileLock(sys.argv[1], blocking=False)
lock.acquire()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_two_jobs_do_not_share_a_folder(interrupted: Path, two_layers: Path) -> None:
    """Nor is one kept out once the other has ended, or has been killed and left its lock behind."""
    with locked_folder(interrupted), pytest.raises(UserError, match="another quantize is at work"):
        go_on(two_layers, interrupted)
    command = [sys.executable, "-P", "-c", KILLED_WITH_THE_LOCK, str(interrupted / LOCK_NAME)]
    assert subprocess.run(command).returncode == -signal.SIGKILL
    assert (interrupted / LOCK_NAME).exists()
    go_on(two_layers, interrupted)
    assert not (interrupted / LOCK_NAME).exists()
