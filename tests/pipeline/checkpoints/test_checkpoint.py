"""Opening checkpoints: what is read is what is stored, and every bad input has a message of its own."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import errors
from safetensors.torch import load_file, save_file
from scalegate.base.errors import UserError
from scalegate.pipeline.checkpoints import download
from scalegate.pipeline.checkpoints.baseline import open_baseline, recorded_source
from scalegate.pipeline.checkpoints.checkpoint import open_checkpoint
from scalegate.pipeline.commands.quantize import quantize
from scalegate.pipeline.conventions.kv_cache import kv_cache_of
from scalegate.pipeline.records.artifact import Artifact

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
CONFIG = {"model_type": "qwen3", "hidden_size": 8}


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """Two shards with an index; the model itself makes no sense and need not."""
    tensors = [{"a.weight": torch.arange(6.0).view(2, 3)}, {"b.weight": torch.ones(4, dtype=torch.bfloat16)}]
    for shard, content in zip(SHARDS, tensors, strict=True):
        save_file(content, tmp_path / shard, metadata={"format": "pt"})
    index = {"weight_map": {"a.weight": SHARDS[0], "b.weight": SHARDS[1]}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def message(folder: Path | str, revision: str | None = None) -> str:
    with pytest.raises(UserError) as caught:
        open_checkpoint(folder, revision)
    assert caught.value.exit_code == 2
    return caught.value.message


def test_every_tensor_reads_as_safetensors_reads_it(example_checkpoint: Path) -> None:
    checkpoint = open_checkpoint(example_checkpoint)
    expected = load_file(example_checkpoint / "model.safetensors")
    assert checkpoint.tensors.keys() == expected.keys()
    assert all(torch.equal(checkpoint.read(name), expected[name]) for name in expected)


def test_the_manifest_is_read_once_and_carried(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Artifact("ORG/NAME", "main", {}, {}, {}, kv_cache="fp8").write(sharded)
    checkpoint, reads = open_checkpoint(sharded), []
    read = Artifact.read
    monkeypatch.setattr(Artifact, "read", lambda folder: reads.append(folder) or read(folder))
    assert kv_cache_of(checkpoint).kv_format == "fp8"
    assert recorded_source(checkpoint) == ("ORG/NAME", "main")
    assert checkpoint.manifest is not None and checkpoint.manifest.source == "ORG/NAME"
    assert reads == [sharded]


def test_a_checkpoint_without_a_manifest_has_none(sharded: Path) -> None:
    assert open_checkpoint(sharded).manifest is None


def test_rows_and_chunks_are_parts_of_the_tensor(
    example_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scalegate.pipeline.checkpoints.safetensors_file.CHUNK_BYTES", 1000)
    info = open_checkpoint(example_checkpoint).tensors["model.embed_tokens.weight"]
    whole = info.read()
    assert torch.equal(info.read_rows(5, 9), whole[5:9])
    chunks = list(info.read_chunks())
    assert len(chunks) > 10
    assert torch.equal(torch.cat(chunks).view(whole.shape), whole)


def test_what_travels_is_neither_weights_nor_records(sharded: Path) -> None:
    for name in ("tokenizer.json", "LICENSE", "pytorch_model.bin", "README.md", "scalegate.json", ".hidden"):
        (sharded / name).write_text("{}")
    checkpoint = open_checkpoint(sharded)
    assert list(checkpoint.other_files().files) == ["LICENSE", "tokenizer.json"]
    assert checkpoint.metadata(sharded / SHARDS[0]) == {"format": "pt"}


def test_an_empty_folder_is_named_empty(tmp_path: Path) -> None:
    assert "is empty" in message(tmp_path)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    assert "there is no folder" in message(tmp_path / "nowhere")


def test_a_revision_of_a_folder_is_refused(sharded: Path) -> None:
    assert "Hub ids only" in message(sharded, "main")


def test_a_hub_snapshot_given_by_path_keeps_its_id_and_commit(sharded: Path, tmp_path_factory) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    cache = tmp_path_factory.mktemp("cache") / "models--some-org--a--model"
    for repository, found in (
        (cache.with_name("models--some-org--a-model"), ("some-org/a-model", commit)),
        (cache.with_name("models--gpt2"), ("gpt2", commit)),
        (cache.with_name("datasets--some-org--text"), None),
        (cache, None),
    ):
        folder = repository / "snapshots" / commit
        shutil.copytree(sharded, folder)
        opened = open_checkpoint(folder)
        assert (opened.public_name, opened.revision) == (found or (commit, None))
    link = cache.with_name("link")
    link.symlink_to(cache.with_name("models--gpt2") / "snapshots" / commit)
    assert open_checkpoint(link).public_name == "gpt2"
    assert open_checkpoint(sharded).revision is None


def test_an_artifact_of_a_snapshot_finds_it_in_its_own_cache(
    example_checkpoint: Path, tmp_path: Path
) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    snapshot = tmp_path / "models--some-org--a-model" / "snapshots" / commit
    shutil.copytree(example_checkpoint, snapshot)
    artifact = quantize(snapshot, out=tmp_path / "out", progress=False)
    assert (artifact.source, artifact.source_revision) == ("some-org/a-model", commit)
    baseline = open_baseline(open_checkpoint(tmp_path / "out"), None)
    assert baseline.folder.resolve() == snapshot.resolve() and baseline.revision == commit
    shutil.rmtree(snapshot)
    assert recorded_source(open_checkpoint(tmp_path / "out")) == ("some-org/a-model", commit)


def test_a_lora_adapter_is_called_one(sharded: Path) -> None:
    (sharded / "adapter_config.json").write_text("{}")
    assert open_checkpoint(sharded).tensors, "beside a whole model it is left alone"
    for name in (*SHARDS, "model.safetensors.index.json"):
        (sharded / name).unlink()
    save_file({"base_model.model.lora_A.weight": torch.ones(2, 2)}, sharded / "adapter_model.safetensors")
    assert "is a LoRA adapter" in message(sharded) and "merge it" in message(sharded)
    (sharded / "config.json").unlink()
    assert "is a LoRA adapter" in message(sharded)


def test_missing_and_malformed_config(sharded: Path) -> None:
    (sharded / "config.json").write_text('{"model_type": ')
    assert "config.json is not valid JSON" in message(sharded)
    (sharded / "config.json").write_text("[]")
    assert "JSON object" in message(sharded)
    (sharded / "config.json").unlink()
    assert "no config.json" in message(sharded)


@pytest.mark.parametrize("config", [{}, {"model_type": "no_such_model"}, {"model_type": 3}])
def test_an_architecture_transformers_does_not_know(sharded: Path, config: dict) -> None:
    (sharded / "config.json").write_text(json.dumps(config))
    assert "unknown architecture" in message(sharded)


def test_no_weights_and_only_other_weights(sharded: Path) -> None:
    for path in sharded.glob("*.safetensors*"):
        path.unlink()
    assert "no weights" in message(sharded)
    (sharded / "pytorch_model.bin").write_bytes(b"x")
    assert "no safetensors weights, only pytorch_model.bin" in message(sharded)


def test_a_shard_that_is_listed_but_absent(sharded: Path) -> None:
    (sharded / SHARDS[1]).unlink()
    assert f"lists {SHARDS[1]}" in message(sharded)


def test_a_tensor_that_the_index_puts_elsewhere(sharded: Path) -> None:
    index = {"weight_map": {"a.weight": SHARDS[0], "b.weight": SHARDS[1], "c.weight": SHARDS[1]}}
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "'c.weight' is in model-00002" in message(sharded)


def test_a_tensor_in_two_shards_without_an_index(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").unlink()
    shutil.copy(sharded / SHARDS[0], sharded / "another.safetensors")
    assert "'a.weight' is in both" in message(sharded)


@pytest.mark.parametrize("keep", [3, 20, -1])
def test_a_truncated_shard(sharded: Path, keep: int) -> None:
    path = sharded / SHARDS[0]
    path.write_bytes(path.read_bytes()[:keep])
    assert "truncated" in message(sharded)


@pytest.mark.parametrize(
    ("header", "why"),
    [
        (b"not json", "not valid JSON"),
        (b"[1]", "not a JSON object"),
        (b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}', "is given 4 bytes"),
        (b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}', "leaves a hole"),
        (b'{"a":{"shape":[1],"data_offsets":[0,4]}}', "malformed"),
        (b'{"a":{"dtype":"F6","shape":[1],"data_offsets":[0,4]}}', "has dtype F6"),
        (b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', "follow the last tensor"),
    ],
)
def test_a_corrupt_header_is_described(sharded: Path, header: bytes, why: str) -> None:
    (sharded / SHARDS[0]).write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    assert why in message(sharded)


def test_a_git_lfs_pointer_is_recognized(sharded: Path) -> None:
    (sharded / SHARDS[0]).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    assert "git lfs pull" in message(sharded)


class Response:
    """As much of a Hub response as huggingface_hub's errors look at."""

    def __init__(self, status: int):
        self.status_code = status
        self.headers: dict[str, str] = {}
        self.request = None


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (errors.GatedRepoError("", response=Response(403)), "is gated"),  # type: ignore[arg-type]
        (errors.RepositoryNotFoundError("", response=Response(404)), "not on the Hub"),  # type: ignore[arg-type]
        (errors.RevisionNotFoundError("", response=Response(404)), "no revision 'v9'"),  # type: ignore[arg-type]
        (errors.HfHubHTTPError("", response=Response(401)), "refused the access token"),  # type: ignore[arg-type]
        (errors.HfHubHTTPError("", response=Response(500)), "HTTP 500"),  # type: ignore[arg-type]
        (errors.OfflineModeIsEnabled("offline"), "offline mode"),
        (errors.HTTPError("no route to host"), "cannot be reached"),
        (OSError(28, "No space left on device"), "cannot store"),
    ],
)
def test_each_way_the_hub_fails_has_its_own_message(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception, said: str
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr(download.HfApi, "model_info", refuse)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert said in message("some-org/some-model", "v9")


@pytest.mark.parametrize(
    ("config", "context"),
    [
        ({"max_position_embeddings": 8192}, 8192),
        ({"max_position_embeddings": 8192, "rope_scaling": {"type": "linear", "factor": 2}}, 8192),
        (
            {
                "max_position_embeddings": 131072,
                "original_max_position_embeddings": 4096,
                "rope_scaling": {"type": "longrope"},
            },
            4096,
        ),
        (
            {
                "text_config": {
                    "max_position_embeddings": 8192,
                    "rope_parameters": {
                        "full_attention": {"rope_type": "dynamic", "original_max_position_embeddings": 2048}
                    },
                }
            },
            2048,
        ),
        ({"max_position_embeddings": 163840, "index_topk": 2048}, 2048),
        ({"max_position_embeddings": 8192, "index_topk": 2048, "index_kpool": 16}, 8192),
        ({}, None),
    ],
)
def test_the_context_served_ends_where_positions_or_keys_depend_on_more(
    sharded: Path, config, context
) -> None:
    (sharded / "config.json").write_text(json.dumps(CONFIG | config))
    assert open_checkpoint(sharded).context_served == context
