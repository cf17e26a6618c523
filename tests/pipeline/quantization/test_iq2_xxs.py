"""IQ2_XXS made, stored and written as GGUF: the solver's choices, our convention, llama.cpp's file."""

import errno
import json
import resource
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.quants import dequantize
from safetensors.torch import load_file, save_file
from scalegate.base.errors import UserError
from scalegate.kernels.iq2_xxs.grid import grid
from scalegate.layouts.formats.int4 import Int4
from scalegate.layouts.formats.iq2_xxs import IQ2XXS
from scalegate.pipeline.checkpoints.checkpoint import open_checkpoint
from scalegate.pipeline.cli.main import main
from scalegate.pipeline.commands.quantize import quantize
from scalegate.pipeline.conventions.all_conventions import convention_of
from scalegate.pipeline.gguf_file.blocks import BLOCK_BYTES, SCALE_BYTES
from scalegate.pipeline.gguf_file.write import write_gguf
from scalegate.pipeline.model_loader.load_model import load_model
from scalegate.pipeline.quantization.quantizers.int4_least_squares import quantize_int4
from scalegate.pipeline.quantization.quantizers.iq2_xxs_search import quantize_iq2_xxs
from scalegate.pipeline.quantization.solvers.importance import importance_of_columns
from scalegate.pipeline.records.artifact import Artifact
from scalegate.pipeline.records.recipe import Recipe
from scalegate.tests.pipeline.quantization.tiny_families import make_text
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

CPU = torch.device("cpu")
SPEC = IQ2XXS()
GATE = "model.layers.0.mlp.gate_proj"


@pytest.fixture(scope="module")
def artifact(example_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("iq2") / "artifact"
    quantize(example_checkpoint, "iq2-xxs", folder, progress=False, device="cpu")
    return folder


@pytest.fixture(scope="module")
def gguf_file(artifact: Path) -> Path:
    result = CliRunner().invoke(main, ["gguf", str(artifact), "--out", str(artifact.parent / "model.gguf")])
    assert result.exit_code == 0, result.output
    return artifact.parent / "model.gguf"


def random_weight(n: int = 24, k: int = 512) -> torch.Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(1)) * 0.02


def test_every_vector_has_the_nearest_entry_at_its_block_s_scale():
    x = random_weight()
    weight = quantize_iq2_xxs(x, SPEC).weight
    scale = weight.scale.float().unsqueeze(-1) * (weight.block_scales() + 0.5) / 4
    signed = weight.dequantize(torch.float32).sign().view(-1, 8) * x.view(-1, 8)
    spread = scale.view(-1, 1).repeat_interleave(4, 0)
    errors = (signed.unsqueeze(1) - spread.unsqueeze(-1) * grid(CPU)).square().sum(-1)
    chosen = errors.gather(1, weight.indices().reshape(-1, 1).long())
    assert (chosen <= errors.amin(1, keepdim=True) * 1.0001).all()


def test_at_most_one_sign_of_a_vector_is_turned_and_it_is_that_of_its_smallest_weight():
    x = random_weight()
    turned = (quantize_iq2_xxs(x, SPEC).weight.dequantize(torch.float32).sign() != x.sign()).view(-1, 8)
    assert set(turned.sum(1).tolist()) == {0, 1}
    smallest = x.abs().view(-1, 8).argmin(1, keepdim=True)
    assert turned.gather(1, smallest).sum() == turned.sum()
    odd = ((x < 0).view(-1, 8).sum(1) & 1).bool()
    assert torch.equal(turned.any(1), odd)


def test_it_is_nearer_than_two_bits_rounded_to_nearest():
    x = random_weight(64)
    found = quantize_iq2_xxs(x, SPEC)
    assert found.relative_error == pytest.approx(
        float((found.weight.dequantize(torch.float32) - x).norm() / x.norm()), rel=1e-5
    )
    groups = x.view(-1, 32)
    low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
    step = (high - low) / 3
    rounded = ((groups - low) / step).round() * step + low
    assert found.relative_error < 0.34 < 0.38 < float((rounded - groups).norm() / groups.norm())


def test_important_columns_are_nearer_and_a_row_depends_on_itself_alone():
    x = random_weight(64)
    importance = torch.ones(512)
    importance[::4] = 100.0
    plain, weighted = (quantize_iq2_xxs(x, SPEC, q).weight.dequantize() for q in (None, importance))
    error = [(made.float() - x)[:, ::4].norm() for made in (plain, weighted)]
    assert error[1] < 0.6 * error[0]
    alone = quantize_iq2_xxs(x[5:6], SPEC, importance).weight.dequantize()
    assert torch.equal(alone, weighted[5:6])


def test_with_no_text_an_input_matters_as_much_as_its_column_is_small():
    x = random_weight(64)
    x[:, :8] *= 4
    x[:, 8] = 0
    importance = importance_of_columns([x[:40], x[40:]])
    assert importance[:8].mean() == pytest.approx(float(importance[9:].mean()) / 4, rel=0.2)
    assert importance.isfinite().all() and importance.mean() == pytest.approx(1, rel=1e-3)
    assert torch.equal(importance_of_columns([torch.zeros(4, 256)]), torch.ones(256))


@pytest.mark.parametrize("value", [0.0, 3.0, -1e-3])
def test_constant_rows_stay_finite(value: float):
    x = torch.full((2, 256), value)
    found = quantize_iq2_xxs(x, SPEC)
    assert found.weight.dequantize(torch.float32).isfinite().all()
    assert found.relative_error < 0.1


def test_the_artifact_is_in_our_own_convention_and_read_again(artifact: Path, example_checkpoint: Path):
    checkpoint, source = open_checkpoint(artifact), open_checkpoint(example_checkpoint)
    stored = convention_of(checkpoint).modules(checkpoint)
    assert len(stored) == 28 and {weight.spec for weight in stored.values()} == {SPEC}
    weight = source.read(f"{GATE}.weight")
    expected = quantize_iq2_xxs(weight, SPEC, importance_of_columns([weight])).weight
    assert not torch.equal(expected.words, quantize_iq2_xxs(weight, SPEC).weight.words)
    read = stored[GATE].read()
    assert all(torch.equal(value, read.tensors()[name]) for name, value in expected.tensors().items())
    recorded = Artifact.read(artifact).quantization
    assert recorded["export"] == "scalegate" and recorded["bits_per_weight"] == 2.0625


def test_the_model_is_loaded_with_what_the_weights_stand_for(artifact: Path):
    loaded = load_model(artifact, progress=False, dtype=torch.float32)
    assert "cpu_dequantized" in loaded.layouts.values()
    tokens = torch.arange(3, 40).view(1, -1)
    found = loaded.model(tokens).logits
    dequantized = load_model(artifact, progress=False, dtype=torch.float32, layout="dequantize")
    expected = dequantized.model(tokens).logits
    assert (found - expected).norm() <= 1e-4 * expected.norm()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.pop(f"{GATE}.weight_scale"), f"{GATE}.weight_scale is missing"),
        (lambda t: t.update({f"{GATE}.weight_words": torch.zeros(8, 17, dtype=torch.int32)}), "no IQ2_XXS"),
        (lambda t: t.update({f"{GATE}.weight_scale": torch.zeros(8, 1, dtype=torch.float16)}), "has to be"),
    ],
    ids=["missing", "words", "scale"],
)  # fmt: skip
def test_tensors_that_are_not_what_the_format_makes_them_are_refused(
    artifact: Path, tmp_path: Path, change, says
):
    folder = Path(shutil.copytree(artifact, tmp_path / "damaged"))
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    checkpoint = open_checkpoint(folder)
    with pytest.raises(UserError, match=says):
        convention_of(checkpoint).modules(checkpoint)


def test_a_width_that_does_not_fit_is_refused_with_the_rule_that_fits(tmp_path: Path, tiny_llama: Path):
    recipe = tmp_path / "strict.yaml"
    recipe.write_text("format: iq2-xxs\n")
    with pytest.raises(
        UserError, match=r"K = 96 is no .* a rule .* with `format: int4` and `group_size: 32`"
    ):
        quantize(tiny_llama, str(recipe), tmp_path / "out", progress=False)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a model whose layers have a K of 256, but one, which has 96."""
    folder = tmp_path_factory.mktemp("mixed")
    source = make_text(folder / "source", "llama", hidden_size=256, head_dim=64, intermediate_size=96)
    quantize(source, "iq2-xxs", folder / "out", progress=False)
    return folder / "out"


def test_a_width_that_256_does_not_divide_gets_four_bits_as_in_llama_cpp(mixed: Path):
    checkpoint, source = open_checkpoint(mixed), open_checkpoint(mixed.parent / "source")
    section = checkpoint.config["quantization_config"]
    narrow = [f"model.layers.{layer}.mlp.down_proj" for layer in range(2)]
    assert section["quant_method"] == "scalegate" and section["others"] == {"int4-g32": narrow}
    stored = convention_of(checkpoint).modules(checkpoint)
    assert len(stored) == 14 and {m for m in stored if stored[m].spec == Int4(32, symmetric=True)} == {
        *narrow
    }
    expected = quantize_int4(source.read(f"{narrow[0]}.weight"), Int4(32, symmetric=True)).weight
    assert torch.equal(stored[narrow[0]].read().dequantize(), expected.dequantize())
    loaded = load_model(mixed, progress=False, dtype=torch.float32)
    plain = load_model(mixed, progress=False, dtype=torch.float32, layout="dequantize")
    tokens = torch.arange(3, 40).view(1, -1)
    found, dequantized = loaded.model(tokens).logits, plain.model(tokens).logits
    assert (found - dequantized).norm() <= 1e-4 * dequantized.norm()


def test_gguf_has_its_four_bits_as_q4_0(mixed: Path, tmp_path: Path):
    checkpoint = open_checkpoint(mixed)
    assert write_gguf(checkpoint, tmp_path / "m.gguf", progress=False).tensors["Q4_0"] == 2
    stored = convention_of(checkpoint).modules(checkpoint)["model.layers.1.mlp.down_proj"].read()
    (theirs,) = [t for t in GGUFReader(tmp_path / "m.gguf").tensors if t.name == "blk.1.ffn_down.weight"]
    assert theirs.tensor_type == GGMLQuantizationType.Q4_0
    assert np.array_equal(
        dequantize(theirs.data, theirs.tensor_type), stored.dequantize(torch.float32).numpy()
    )


def test_formats_that_the_convention_has_not_are_refused(mixed: Path, tmp_path: Path):
    folder = Path(shutil.copytree(mixed, tmp_path / "other"))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["others"] = {"int3-g32": []}
    (folder / "config.json").write_text(json.dumps(config))
    checkpoint = open_checkpoint(folder)
    with pytest.raises(UserError, match="has to list modules by format: int4-g32"):
        convention_of(checkpoint).modules(checkpoint)


def test_gguf_s_reader_lists_the_file_and_dequantizes_to_our_bits(artifact: Path, gguf_file: Path):
    reader = GGUFReader(gguf_file)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    checkpoint = open_checkpoint(artifact)
    stored = convention_of(checkpoint).modules(checkpoint)
    ours = stored[GATE].read().dequantize(torch.float32).numpy()
    theirs = tensors["blk.0.ffn_gate.weight"]
    assert theirs.tensor_type == GGMLQuantizationType.IQ2_XXS and list(theirs.shape) == [256, 768]
    assert np.array_equal(dequantize(theirs.data, theirs.tensor_type), ours)
    kinds = [tensor.tensor_type.name for tensor in tensors.values()]
    assert kinds.count("IQ2_XXS") == 28 and kinds.count("BF16") == 1
    norm = checkpoint.read("model.layers.2.input_layernorm.weight").float().numpy()
    assert np.array_equal(tensors["blk.2.attn_norm.weight"].data, norm)
    config = checkpoint.config
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert fields["general.architecture"] == "qwen3"
    assert fields["qwen3.block_count"] == config["num_hidden_layers"]
    assert fields["qwen3.attention.key_length"] == config["head_dim"]
    assert fields["qwen3.rope.freq_base"] == config["rope_parameters"]["rope_theta"]


def test_the_tokenizer_is_in_the_file(artifact: Path, gguf_file: Path):
    fields = {name: field.contents() for name, field in GGUFReader(gguf_file).fields.items()}
    tokenizer = json.loads((artifact / "tokenizer.json").read_text())
    assert fields["tokenizer.ggml.model"] == "gpt2" and fields["tokenizer.ggml.pre"] == "gpt-2"
    assert {text: i for i, text in enumerate(fields["tokenizer.ggml.tokens"])} == tokenizer["model"][
        "vocab"
    ] | {added["content"]: added["id"] for added in tokenizer["added_tokens"]}
    assert len(fields["tokenizer.ggml.merges"]) == len(tokenizer["model"]["merges"])
    assert fields["tokenizer.ggml.eos_token_id"] == 0


def test_iq2_xxs_tensors_have_their_bits_in_gguf(artifact: Path, gguf_file: Path):
    checkpoint = open_checkpoint(artifact)
    expected = convention_of(checkpoint).modules(checkpoint)[GATE].read()
    tensors = {tensor.name: tensor for tensor in GGUFReader(gguf_file).tensors}
    packed = [t for t in tensors.values() if t.tensor_type == GGMLQuantizationType.IQ2_XXS]
    assert len(packed) == 28
    blocks = tensors["blk.0.ffn_gate.weight"].data.reshape(expected.shape[0], -1, BLOCK_BYTES)
    scale = blocks[..., :SCALE_BYTES].copy().view(np.float16)[..., 0]
    words = blocks[..., SCALE_BYTES:].copy().view(np.int32).reshape(expected.shape[0], -1)
    assert np.array_equal(scale, expected.scale.numpy())
    assert np.array_equal(words, expected.words.numpy())


def test_llama_s_query_and_key_rows_are_written_as_llama_cpp_rotates_them(tmp_path: Path, tiny_llama: Path):
    out = write_gguf(open_checkpoint(tiny_llama), tmp_path / "llama.gguf", progress=False)
    assert out.without_tokenizer is not None
    tensors = {tensor.name: tensor.data for tensor in GGUFReader(out.path).tensors}
    source = open_checkpoint(tiny_llama)
    for name, gguf_name, moves in (
        ("q_proj", "attn_q", True),
        ("k_proj", "attn_k", True),
        ("v_proj", "attn_v", False),
    ):
        rows = source.read(f"model.layers.0.self_attn.{name}.weight")
        written = torch.from_numpy(tensors[f"blk.0.{gguf_name}.weight"].copy())
        heads = rows.view(-1, 2, 8, 64).transpose(1, 2).reshape(rows.shape) if moves else rows
        assert torch.equal(written, heads) and (torch.equal(written, rows) != moves)


def changed(source: Path, folder: Path, config: dict, tensors: dict | None = None) -> Path:
    shutil.copytree(source, folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    if tensors:
        weights = folder / "model.safetensors"
        save_file(load_file(weights) | tensors, weights, {"format": "pt"})
    return folder


def test_tensors_that_are_no_weights_are_not_in_the_file(tiny_llama: Path, tmp_path: Path):
    layer = "model.layers.0.self_attn"
    beside = {f"{layer}.rotary_emb.inv_freq": torch.ones(8), f"{layer}.k_scale": torch.ones(1)}
    folder = changed(tiny_llama, tmp_path / "old", {}, beside)
    written = write_gguf(open_checkpoint(folder), tmp_path / "old.gguf", progress=False)
    plain = write_gguf(open_checkpoint(tiny_llama), tmp_path / "plain.gguf", progress=False)
    assert written.tensors == plain.tensors


def test_matrices_are_rounded_to_q8_0(tiny_llama: Path, tmp_path: Path):
    source, out = open_checkpoint(tiny_llama), tmp_path / "q8.gguf"
    result = CliRunner().invoke(main, ["gguf", str(tiny_llama), "--matrices", "q8_0", "--out", str(out)])
    assert result.exit_code == 0 and "9 × Q8_0, 3 × F32" in result.output
    tensors = {tensor.name: tensor for tensor in GGUFReader(out).tensors}
    for name, gguf_name in (("mlp.down_proj", "ffn_down"), ("self_attn.v_proj", "attn_v")):
        meant = source.read(f"model.layers.0.{name}.weight").numpy()
        found = dequantize(tensors[f"blk.0.{gguf_name}.weight"].data, GGMLQuantizationType.Q8_0)
        # A code is at most a half off, and the fp16 scale moves the largest, 127, by 127 * 2^-11.
        step = np.abs(meant).reshape(len(meant), -1, 32).max(-1) / 127
        bound = np.repeat(step * (0.5 + 127 * 2.0**-11) * 1.001, 32, axis=1)
        assert np.all(np.abs(found - meant) <= bound) and not np.array_equal(found, meant)
    result = CliRunner().invoke(main, ["gguf", str(tiny_llama), "--matrices", "q4_k", "--out", str(out)])
    assert result.exit_code == 2 and "llama-quantize" in result.output


def test_llama3_and_yarn_rope_are_written_as_llama_cpp_reads_them(tiny_llama: Path, tmp_path: Path):
    numbers = {"rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64}
    llama3 = numbers | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    folder = changed(tiny_llama, tmp_path / "llama3", {"rope_parameters": llama3})
    reader = GGUFReader(write_gguf(open_checkpoint(folder), tmp_path / "llama3.gguf", progress=False).path)
    (factors,) = [tensor.data for tensor in reader.tensors if tensor.name == "rope_freqs.weight"]
    scaled = ROPE_INIT_FUNCTIONS["llama3"](AutoConfig.from_pretrained(folder), "cpu")[0]
    plain = 10000.0 ** (-torch.arange(0, 16, 2) / 16)
    assert torch.allclose(torch.from_numpy(factors.copy()), plain / scaled, rtol=1e-5)
    assert factors.min() == 1.0 and factors.max() == 8.0
    folder = changed(tiny_llama, tmp_path / "yarn", {"rope_parameters": numbers | {"rope_type": "yarn"}})
    reader = GGUFReader(write_gguf(open_checkpoint(folder), tmp_path / "yarn.gguf", progress=False).path)
    said = {
        name.removeprefix("llama.rope.scaling."): field.contents() for name, field in reader.fields.items()
    }
    assert (said["type"], said["factor"], said["original_context_length"]) == ("yarn", 8.0, 64)
    folder = changed(tiny_llama, tmp_path / "other", {"rope_parameters": numbers | {"rope_type": "dynamic"}})
    with pytest.raises(UserError, match="not for 'dynamic'"):
        write_gguf(open_checkpoint(folder), tmp_path / "other.gguf", progress=False)


def test_a_tokenizer_of_another_kind_is_refused(tiny_llama: Path, tmp_path: Path):
    folder = changed(tiny_llama, tmp_path / "metaspace", {})
    model = {"type": "BPE", "vocab": {"a": 0}, "merges": []}
    (folder / "tokenizer.json").write_text(
        json.dumps({"model": model, "pre_tokenizer": {"type": "Metaspace"}})
    )
    with pytest.raises(UserError, match=r"its tokenizer .* is not a byte-level BPE"):
        write_gguf(open_checkpoint(folder), tmp_path / "no.gguf", progress=False)
    assert not (tmp_path / "no.gguf").exists()


def test_a_full_disk_is_said_to_be_one(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(GGUFWriter, "write_tensor_data", full)
    with pytest.raises(UserError, match="no room to write"):
        write_gguf(open_checkpoint(tiny_llama), tmp_path / "no.gguf", progress=False)
    assert list(tmp_path.iterdir()) == []


def test_so_is_one_that_takes_a_part_of_a_tensor(tiny_llama: Path, tmp_path: Path):
    """A limit on the size of files ends numpy's writing as a full disk does."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
        with pytest.raises(UserError, match=r"no room to write .* requested and .* written"):
            write_gguf(open_checkpoint(tiny_llama), tmp_path / "no.gguf", progress=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert list(tmp_path.iterdir()) == []


def test_an_architecture_that_gguf_cannot_name_is_refused_by_name(tiny_llama: Path, tmp_path: Path):
    path = tiny_llama / "config.json"
    config = json.loads(path.read_text())
    folder = Path(shutil.copytree(tiny_llama, tmp_path / "other"))
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "gpt_bigcode"}))
    with pytest.raises(UserError, match="not for 'gpt_bigcode' models"):
        write_gguf(open_checkpoint(folder), tmp_path / "no.gguf", progress=False)
    assert not (tmp_path / "no.gguf").exists()


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=32, max_position_embeddings=64,
    )  # fmt: skip
    LlamaForCausalLM(config).float().save_pretrained(folder)
    return folder


def test_calibration_text_says_which_inputs_matter(example_checkpoint: Path, tmp_path: Path):
    lines = "def main(arguments):\n    return [len(one) for one in arguments]\n" * 60
    (tmp_path / "text.txt").write_text(lines)
    source, recipe = open_checkpoint(example_checkpoint), Recipe("one", spec=SPEC, include=(GATE,))
    out, text = tmp_path / "calibrated", tmp_path / "text.txt"
    quantize(example_checkpoint, recipe, out, calibration=text, progress=False, device="cpu")
    original = source.read(f"{GATE}.weight").float()
    squares = squared_inputs_of(example_checkpoint, lines)
    checkpoint = open_checkpoint(out)
    weighted = convention_of(checkpoint).modules(checkpoint)[GATE].read()
    plain = quantize_iq2_xxs(original, SPEC).weight
    errors = [
        float(((made.dequantize(torch.float32) - original).square() * squares).sum())
        for made in (plain, weighted)
    ]
    assert errors[1] < 0.95 * errors[0]
    assert load_model(out, progress=False).layouts, "what the recipe left out stays unquantized"


def squared_inputs_of(checkpoint: Path, text: str) -> torch.Tensor:
    """Of GATE, as transformers runs the model."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    seen: list[torch.Tensor] = []
    model.get_submodule(GATE).register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    model(AutoTokenizer.from_pretrained(checkpoint)(text, return_tensors="pt")["input_ids"][:, :1024])
    return seen[0].detach().float().square().sum((0, 1))
