"""Every broken artifact is caught by the check that it is for, which names the cause; sound ones pass.

Without servers: files and in-process predictions. `whole_gate.py` takes the same through all of `validate`.
"""

from pathlib import Path

import pytest
from scalegate.base.errors import UserError
from scalegate.pipeline.model_loader.load_model import load_model
from scalegate.pipeline.records.artifact import MANIFEST_NAME
from scalegate.serving_check.checks import other_readers, text_files, weights
from scalegate.tests.exhaustive import exhaustive_but

from .artifacts import FAULTS, INT4, ArtifactFault, break_artifact
from .sound_artifacts import Sound, judge_files, judge_quality, make_sound

SEEDS = (0, 1, 2)
IN_FILES = [
    fault for fault in FAULTS.values() if fault.check in (weights.NAME, text_files.NAME, other_readers.NAME)
]
REFUSED = [fault for fault in FAULTS.values() if fault.check == "refused"]
TOKENS = 1024


@pytest.fixture(scope="module")
def sound(example_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Sound]:
    return make_sound(example_checkpoint, tmp_path_factory.mktemp("zoo"))


def broken(sound: dict[str, Sound], fault: ArtifactFault, folder: Path, seed: int = 0) -> Path:
    return break_artifact(sound[fault.of].copy(folder), fault, seed)


def test_sound_artifacts_pass_with_and_without_their_manifests(sound, tmp_path: Path):
    for kind, artifact in sound.items():
        foreign = artifact.copy(tmp_path / kind)
        (foreign / MANIFEST_NAME).unlink()
        for folder in (artifact.artifact, foreign):
            for result in judge_files(folder, artifact.baseline).values():
                assert result.status == "pass", (kind, folder, result)


@pytest.mark.parametrize("seed", exhaustive_but(SEEDS, 0))
@pytest.mark.parametrize("fault", IN_FILES, ids=lambda fault: fault.name)
def test_a_fault_in_the_files_is_caught_by_its_check_alone_and_named(
    sound, fault: ArtifactFault, seed: int, tmp_path: Path
):
    folder = broken(sound, fault, tmp_path / "broken", seed)
    results = judge_files(folder, sound[fault.of].baseline)
    assert results[fault.check].status == "fail"
    assert fault.words in results[fault.check].reason
    assert [name for name, result in results.items() if result.status != "pass"] == [fault.check]


@pytest.mark.parametrize("fault", REFUSED, ids=lambda fault: fault.name)
def test_a_checkpoint_that_other_engines_would_misread_is_refused(
    sound, fault: ArtifactFault, tmp_path: Path
):
    with pytest.raises(UserError) as refusal:
        load_model(broken(sound, fault, tmp_path / "broken"), device="cpu", progress=False)
    assert fault.words in refusal.value.message


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("a shared global scale corrupted", "far from others of their kind: model.layers.0.mlp"),
        ("two layers swapped", "far from others of their kind: model.layers."),
        ("rare embeddings shuffled", "82 of 8192 rows"),
        ("a router quantized", "are routers"),
        ("nothing quantized", "no module is quantized: these are unquantized weights"),
    ],
)
def test_another_tools_artifact_is_caught_without_a_manifest(sound, name: str, words: str, tmp_path: Path):
    folder = broken(sound, FAULTS[name], tmp_path / "broken")
    (folder / MANIFEST_NAME).unlink()
    result = judge_files(folder, sound[FAULTS[name].of].baseline)[weights.NAME]
    assert result.status == "fail" and words in result.reason


@pytest.mark.parametrize(
    ("name", "words"),
    exhaustive_but(
        [
            ("the vocabulary rotated", "a finer recipe will not help"),
            ("zero points of every linear shifted", "a finer recipe will not help"),
            (None, "computed over the whole vocabulary"),
        ],
        ("the vocabulary rotated", "a finer recipe will not help"),
        (None, "computed over the whole vocabulary"),
    ),
)
def test_quality_says_whether_rounding_is_to_blame(sound, name: str | None, words: str, tmp_path: Path):
    artifact = sound[INT4]
    folder = artifact.artifact if name is None else broken(sound, FAULTS[name], tmp_path / "broken")
    result = judge_quality(folder, artifact.baseline, TOKENS)
    assert result.status == ("pass" if name is None else "fail")
    assert words in result.reason and "smaller groups" not in result.reason
    assert name is not None or result.figures["mean_kl_low"] < result.figures["mean_kl"]
