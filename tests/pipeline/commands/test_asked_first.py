"""What a later stage of a release would refuse is said before anything is made, in a dry run too."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scalegate.base.errors import UserError
from scalegate.pipeline.commands import asked_first
from scalegate.pipeline.commands import quantize as quantize_module
from scalegate.pipeline.commands.quantize import quantize
from scalegate.pipeline.commands.release import release
from scalegate.pipeline.commands.release_preview import preview_release
from scalegate.tests.pipeline.quantization.tiny_families import make_text
from transformers import Qwen3Config, Qwen3ForCausalLM

WEIGHTS = 2 * (4 * 128 * 128 + 3 * 128 * 128 + 2 * 64 * 128)
"""Bytes of the source's matrices in bf16, at least."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    config = Qwen3Config(
        vocab_size=64, hidden_size=128, intermediate_size=128, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, head_dim=64, max_position_embeddings=512,
    )  # fmt: skip
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(params=[release, preview_release])
def asking(request: pytest.FixtureRequest, tiny: Path, tmp_path: Path) -> Callable[..., Any]:
    """The release, or its dry run; what it is asked for is refused, and nothing is made."""

    def ask(model: Path = tiny, **options: Any) -> Any:
        at = {"work": tmp_path / "work", "device": "cpu", "m": (1, 32)}
        try:
            return request.param(model, "int4-hqq", f"folder:{tmp_path / 'target'}", **at, **options)
        finally:
            assert not (tmp_path / "work").exists() and not (tmp_path / "target").exists()

    return ask


def free(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(asked_first.shutil, "disk_usage", lambda path: SimpleNamespace(free=size))


def test_a_full_disk(asking: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, 1000)
    with pytest.raises(
        UserError, match=r"no room: .* MB into .*tiny-int4-hqq, .* into .*target, and the disk"
    ):
        asking()


def test_a_disk_without_room_for_the_rival(
    asking: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # INT4 and its copy take a quarter of the weights each, and INT8 for the rival half: more than is free.
    free(monkeypatch, int(0.75 * WEIGHTS))
    with pytest.raises(UserError, match=r"no room: .*tiny-int8"):
        asking(rival="int8")


def test_little_memory(asking: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asked_first.psutil, "virtual_memory", lambda: SimpleNamespace(available=WEIGHTS))
    with pytest.raises(UserError, match=r"no room: the servers hold at least .* GiB of weights"):
        asking()


def test_little_memory_beside_the_weights(
    asking: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Both servers' weights take less than this, and 32 requests more: 512 bytes for each token.
    available = 4 * WEIGHTS
    assert available < 32 * 512 * 128
    monkeypatch.setattr(asked_first.psutil, "virtual_memory", lambda: SimpleNamespace(available=available))
    with pytest.raises(UserError, match=r"keeps .* GiB of keys, values and states for 32 requests"):
        asking()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"baseline": "./absent"}, "there is no folder ./absent"),
        ({"rival": "./absent"}, "there is no folder ./absent"),
        ({"input_len": 500}, "do not fit the 512 tokens"),
    ],
)
def test_what_cannot_be_opened_served_or_made(
    asking: Callable[..., Any], options: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        asking(**options)


def test_a_rival_that_would_stay_as_it_is(asking: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "none.yaml").write_text("format: int8\nignore: ['*']\n")
    with pytest.raises(UserError, match="the recipe 'none' leaves nothing to quantize"):
        asking(rival=str(tmp_path / "none.yaml"))


def test_requests_longer_than_the_engine_serves(
    asking: Callable[..., Any], tiny: Path, tmp_path: Path
) -> None:
    model = shutil.copytree(tiny, tmp_path / "dynamic")
    config = json.loads((model / "config.json").read_text())
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 64}
    (model / "config.json").write_text(json.dumps(config | {"rope_parameters": rope}))
    with pytest.raises(UserError, match=r"at most 64 tokens.* are served \(--input-len \+ --output-len\)"):
        asking(model)
    with pytest.raises(UserError, match=r"at most 64 tokens.* are served \(--max-model-len 64\)"):
        asking(model, max_model_len=128)


def test_a_text_that_cannot_be_read(
    asking: Callable[..., Any], example_checkpoint: Path, tmp_path: Path
) -> None:
    (tmp_path / "short.txt").write_text("A few words.")
    for name, said in (("short.txt", "tokens to predict"), ("absent.txt", "cannot read the held-out text")):
        with pytest.raises(UserError, match=said):
            asking(example_checkpoint, text=tmp_path / name)


def test_tools_that_are_not_here(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lacks() -> None:
        raise UserError("--tasks runs lm-eval, which is not installed")

    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(asked_first, "require_lm_eval", lacks)
    at = {"work": tmp_path / "work", "m": (1, 32), "engine": "vllm", "tasks": "arc_easy"}
    to = f"folder:{tmp_path / 'target'}"
    with pytest.raises(UserError, match=r"--engine vllm: no `vllm` command on PATH.*\n--tasks runs lm-eval"):
        release(tiny, "int4-hqq", to, **at)
    assert not (tmp_path / "work").exists()
    # A dry run may be made on another machine.
    notes = preview_release(tiny, "int4-hqq", to, **at).notes
    assert ["--engine vllm" in notes[0], "lm-eval" in notes[1]] == [True, True]


def test_experts_that_vllm_skips(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 128, "max_position_embeddings": 512}
    source = make_text(tmp_path / "oss", "gpt_oss", **sizes)
    monkeypatch.setattr(asked_first, "lacking_tools", lambda request: [])
    to, at = f"folder:{tmp_path / 'target'}", {"work": tmp_path / "work", "m": (1, 32)}
    for asking in (release, preview_release):
        with pytest.raises(UserError, match=r"--engine vllm: .*skips single experts.*ignore"):
            asking(source, "int4-hqq", to, engine="vllm", **at)
    assert not (tmp_path / "work").exists()
    notes = preview_release(source, "mxfp4-experts", to, engine="vllm", **at).notes
    assert not any("vLLM will not load" in note for note in notes), "gpt-oss' own form is read"


def test_a_base_without_a_licence_is_said(tiny: Path, tmp_path: Path) -> None:
    to = f"folder:{tmp_path / 'target'}"
    at = {"work": tmp_path / "work", "device": "cpu", "m": (1, 32)}
    [note] = preview_release(tiny, "int4-hqq", to, **at).notes
    assert note == "the card of tiny names no licence, so the release's will name none"


def test_quantize_says_before_its_first_shard_that_the_disk_is_full(
    example_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantize_module.shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 20))
    with pytest.raises(UserError, match=r"no room to write in .* MB are still to be written, 1 MB are free"):
        quantize(example_checkpoint, out=tmp_path / "out", progress=False)
    assert not list((tmp_path / "out").glob("*.safetensors"))
    monkeypatch.undo()
    quantize(example_checkpoint, out=tmp_path / "out", progress=False)
