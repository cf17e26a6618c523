"""What checkpoints declare of their KV cache, as compressed-tensors and ModelOpt write it."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from scalegate.base.errors import UserError
from scalegate.pipeline.checkpoints.checkpoint import open_checkpoint
from scalegate.pipeline.conventions.kv_cache import kv_cache_of
from scalegate.pipeline.model_loader.load_model import load_model
from scalegate.pipeline.model_loader.served_checkpoint import build_engine
from scalegate.serving_check.engine.options import EngineOptions
from scalegate.serving_check.engine.request import SamplingParams

SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


def compressed_tensors(pair, layer: int = 0, **scales: torch.Tensor) -> Path:
    """The pair's quantized checkpoint with a KV scheme, and scales in one layer's attention."""
    return with_scales(pair.quantized, {f"model.layers.{layer}.self_attn.{n}": t for n, t in scales.items()})


def with_scales(folder: Path, scales: dict[str, torch.Tensor], **declared) -> Path:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config.setdefault("quantization_config", {}).update(declared or {"kv_cache_scheme": SCHEME})
    path.write_text(json.dumps(config))
    save_file({**load_file(folder / "model.safetensors"), **scales}, folder / "model.safetensors")
    return folder


def test_without_a_declaration_auto_is_unquantized(quantized_pair):
    folder = quantized_pair("qwen3").quantized
    assert kv_cache_of(open_checkpoint(folder)).kv_format == "unquantized"


def test_compressed_tensors_scales_of_a_tensor_and_of_each_head(quantized_pair):
    scales = {"k_scale": torch.tensor([0.5]), "v_scale": torch.tensor([[[0.25]], [[0.125]]])}
    folder = compressed_tensors(quantized_pair("qwen3"), layer=1, **scales)
    cache = kv_cache_of(open_checkpoint(folder))
    assert cache.kv_format == "fp8" and list(cache.scales) == [1]
    assert cache.scales[1].key.tolist() == [0.5] and cache.scales[1].value.tolist() == [0.25, 0.125]
    assert kv_cache_of(open_checkpoint(folder), "unquantized").scales == {}
    assert kv_cache_of(open_checkpoint(folder), "int8_per_token_head").kv_format == "int8_per_token_head"
    load_model(folder, progress=False)


def test_a_checkpoint_whose_kv_cache_alone_is_quantized(random_checkpoint):
    scales = {f"model.layers.0.self_attn.{kind}_scale": torch.tensor([0.5]) for kind in "kv"}
    declared = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": SCHEME}
    folder = with_scales(random_checkpoint("qwen3"), scales, **declared)
    assert kv_cache_of(open_checkpoint(folder)).kv_format == "fp8"
    assert load_model(folder, progress=False).layouts == {}


@pytest.mark.parametrize(
    "names", [("k_proj.k_scale", "v_proj.v_scale"), ("k_proj.output_scale", "v_proj.output_scale")]
)
def test_modelopt_and_older_names(quantized_pair, names: tuple[str, str]):
    scales = {
        f"model.layers.0.self_attn.{name}": torch.tensor(x) for name, x in zip(names, (0.5, 2.0), strict=True)
    }
    folder = with_scales(quantized_pair("qwen3").quantized, scales, kv_cache_quant_algo="FP8")
    cache = kv_cache_of(open_checkpoint(folder))
    assert (cache.kv_format, cache.scales[0].key.tolist(), cache.scales[0].value.tolist()) == (
        "fp8",
        [0.5],
        [2.0],
    )


def test_modelopts_sidecar_declares_it_too(quantized_pair):
    folder = quantized_pair("qwen3").quantized
    sidecar = {"quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}}
    (folder / "hf_quant_config.json").write_text(json.dumps(sidecar))
    assert kv_cache_of(open_checkpoint(folder)).kv_format == "fp8"


def test_a_format_that_the_engine_has_not_is_refused_unless_another_is_asked_for(quantized_pair):
    folder = with_scales(quantized_pair("qwen3").quantized, {}, kv_cache_quant_algo="FP6")
    with pytest.raises(UserError, match=r"declares a KV cache of FP6.*--kv-cache-dtype: unquantized, fp8"):
        kv_cache_of(open_checkpoint(folder))
    assert kv_cache_of(open_checkpoint(folder), "unquantized").kv_format == "unquantized"


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        ({"k_scale": torch.tensor([0.5])}, "layer 0 has a KV scale for k only"),
        (
            {"k_scale": torch.ones(3), "v_scale": torch.ones(1)},
            "k_scale has 3 scales; give one, or one for each of 2",
        ),
        (
            {"k_scale": torch.tensor([0.0]), "v_scale": torch.ones(1)},
            "k_scale holds a scale that is not above 0",
        ),
        (
            {"k_scale": torch.tensor([float("nan")]), "v_scale": torch.ones(1)},
            "k_scale holds a scale that is not",
        ),
    ],
)
def test_scales_that_cannot_be_are_refused_by_name(quantized_pair, scales, message: str):
    folder = compressed_tensors(quantized_pair("qwen3"), **scales)
    with pytest.raises(UserError, match=message):
        kv_cache_of(open_checkpoint(folder))


def test_the_engine_gets_the_declared_format_with_its_scales(quantized_pair):
    ones = {"k_scale": torch.tensor([0.01]), "v_scale": torch.tensor([0.01])}
    folder = compressed_tensors(quantized_pair("qwen3"), **ones)

    def answer(kv_cache_dtype: str):
        options = EngineOptions(device="cpu", dtype="float32", max_num_seqs=2, kv_cache_dtype=kv_cache_dtype)
        engine = build_engine(folder, options)
        stored = engine.pool.layers[0].stored
        return stored.key_pages.dtype, stored.key_scale, engine.generate([[5, 6, 7, 8]], GREEDY)[0].token_ids

    dtype, scale, fp8 = answer("auto")
    assert dtype == torch.float8_e4m3fn and scale.tolist() == pytest.approx([0.01, 0.01])
    dtype, scale, plain = answer("unquantized")
    assert dtype == torch.float32 and scale is None and len(fp8) == len(plain) == 12
