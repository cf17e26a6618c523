"""What the exporters write: read back unchanged, and in the bytes and patterns their readers expect."""

import json
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from scalegate.layouts.formats.int4 import Int4, Int4Weight, pack_nibbles
from scalegate.layouts.formats.int8 import WHOLE_ROW, Int8, Int8Weight
from scalegate.layouts.formats.nvfp4 import NVFP4
from scalegate.pipeline.checkpoints.checkpoint import open_checkpoint
from scalegate.pipeline.conventions.all_conventions import EXPORTS, convention_of
from scalegate.pipeline.conventions.compressed_tensors.pack_quantized import _pack_along_n, _unpack_along_n
from scalegate.pipeline.conventions.targets import as_patterns, matches
from scalegate.pipeline.conventions.torchao_bytes import (
    pack_tiles,
    pad_to_tiles,
    swizzle,
    unpack_tiles,
    unswizzle,
)


def random_weight(n: int, k: int, group_size: int) -> Int4Weight:
    generator = torch.Generator().manual_seed(n * k)
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, generator=generator)
    scale = torch.rand(n, k // group_size, generator=generator).to(torch.bfloat16) + 0.5
    zero = torch.randint(0, 16, scale.shape, dtype=torch.uint8, generator=generator)
    return Int4Weight(Int4(group_size), pack_nibbles(codes), scale, zero)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", [32, 64, -1])
def test_every_weight_comes_back_as_it_was_written(quantized_pair, symmetric: bool, group_size: int) -> None:
    pair = quantized_pair("qwen3", symmetric, lambda module: group_size)
    quantized, plain = open_checkpoint(pair.quantized), open_checkpoint(pair.dequantized)
    stored = convention_of(quantized).modules(quantized)
    assert set(stored) == set(pair.specs)
    for module, weight in stored.items():
        assert weight.spec == pair.specs[module]
        assert torch.equal(weight.read().dequantize(torch.float32), plain.read(f"{module}.weight"))


@pytest.mark.parametrize("n", [1, 7, 8, 20])
def test_zero_points_are_padded_to_whole_words_along_n(n: int) -> None:
    zero = torch.arange(n * 3, dtype=torch.uint8).view(n, 3) % 16
    words = _pack_along_n(zero)
    assert words.dtype == torch.int32 and words.shape == (-(-n // 8), 3)
    assert torch.equal(_unpack_along_n(words, n), zero)
    assert int(words[0, 1]) & 0xF == int(zero[0, 1])
    if n > 1:
        assert (int(words[0, 1]) >> 4) & 0xF == int(zero[1, 1])


def test_a_word_holds_eight_columns_least_significant_first() -> None:
    weight = Int4Weight(
        Int4(16, symmetric=True),
        pack_nibbles(torch.arange(16, dtype=torch.uint8).view(1, 16) % 8),
        torch.ones(1, 1),
        torch.full((1, 1), 8, dtype=torch.uint8),
    )
    tensors = EXPORTS["compressed-tensors"].tensors("m", weight)
    assert tensors["m.weight_packed"].tolist() == [[0x76543210, 0x76543210]]
    assert tensors["m.weight_shape"].tolist() == [1, 16]
    assert "m.weight_zero_point" not in tensors


def test_a_word_holds_four_columns_of_int8_least_significant_first_and_128_above() -> None:
    codes = torch.tensor([[-128, -127, 0, 127, 1, 2, 3, -1]], dtype=torch.int8)
    for spec in (Int8(WHOLE_ROW), Int8(32)):
        weight = Int8Weight(spec, codes.repeat(1, 4), torch.ones(1, 1))
        tensors = EXPORTS["compressed-tensors"].tensors("m", weight)
        words = [word & 0xFFFFFFFF for word in tensors["m.weight_packed"][0].tolist()]
        assert words == [0xFF800100, 0x7F838281] * 4
        assert tensors["m.weight_shape"].tolist() == [1, 32]
        assert set(tensors) == {"m.weight_packed", "m.weight_scale", "m.weight_shape"}


def test_int4_and_int8_are_two_groups_of_one_format() -> None:
    specs = {"a.q": Int4(64), "a.k": Int8(128), "a.v": Int8(WHOLE_ROW)}
    config = EXPORTS["compressed-tensors"].quantization_config(specs, ["lm_head"])
    assert config["format"] == "pack-quantized"
    groups = {group["targets"][0]: group for group in config["config_groups"].values()}
    assert {group["format"] for group in groups.values()} == {"pack-quantized"}
    said = [
        (group["weights"]["num_bits"], group["weights"]["strategy"], group["weights"]["group_size"])
        for group in groups.values()
    ]
    assert said == [(4, "group", 64), (8, "group", 128), (8, "channel", None)]


def test_asymmetric_zeros_are_never_dropped_in_silence() -> None:
    weight = random_weight(8, 64, 32)
    convention = EXPORTS["compressed-tensors"]
    with pytest.raises(ValueError, match="written as symmetric"):
        convention.tensors("m", replace(weight, spec=Int4(32, symmetric=True)))
    spec = Int4(32, zero_point="fractional")
    assert "cannot store fractional zero points" in convention.refuses(spec, "m")
    with pytest.raises(ValueError, match="fractional"):
        convention.tensors("m", replace(weight, spec=spec, zero_point=weight.zero_point + 0.5))
    with pytest.raises(ValueError, match="fractional"):
        convention.tensors("m", replace(weight, zero_point=weight.zero_point + 0.5))


def test_a_format_that_is_read_only_is_refused_with_those_that_are_written() -> None:
    class ReadOnly(NVFP4):
        name = "nvfp4-of-others"

    refused = EXPORTS["compressed-tensors"].refuses(ReadOnly(), "m")
    assert "not written in nvfp4-of-others; it is in fp8, mxfp4, mxfp8, nvfp4, int4" in refused
    assert "written in int4 and nvfp4, not in nvfp4-of" in EXPORTS["torchao"].refuses(ReadOnly(), "m")
    assert "ModelOpt has no form for INT4" in EXPORTS["modelopt"].refuses(Int4(), "m")


def test_one_group_size_targets_linear_and_several_are_told_apart_by_name() -> None:
    names = [f"model.layers.{i}.mlp.{p}_proj" for i in range(3) for p in ("gate", "up", "down")]
    convention = EXPORTS["compressed-tensors"]
    config = convention.quantization_config(dict.fromkeys(names, Int4(128)), ["lm_head"])
    assert config["format"] == "pack-quantized"
    assert config["config_groups"]["group_0"]["targets"] == ["Linear"]
    sizes = {name: 64 if name.endswith("down_proj") or ".0." in name else 128 for name in names}
    several = convention.quantization_config({m: Int4(size) for m, size in sizes.items()}, ["lm_head"])
    for group in several["config_groups"].values():
        size = group["weights"]["group_size"]
        named = [name for name in names if any(matches(t, name) for t in group["targets"])]
        assert named == [name for name in names if sizes[name] == size]


def test_patterns_never_name_a_module_of_another_group_or_of_none() -> None:
    groups = {"a": ["l.0.q", "l.1.q", "l.0.k"], "b": ["l.1.k"]}
    others = ["l.2.q"]
    patterns = as_patterns(groups, others)
    for group, names in groups.items():
        everything = [*groups["a"], *groups["b"], *others]
        assert [n for n in everything if any(matches(p, n) for p in patterns[group])] == names
    assert any(p.startswith("re:") for p in as_patterns(groups, [])["a"])


def test_tiles_are_those_of_torchs_cuda_converter() -> None:
    weight = pad_to_tiles(random_weight(20, 192, 64))
    words = pack_tiles(weight.codes)
    assert torch.equal(unpack_tiles(words), weight.codes)
    # The converter's own arithmetic, lane by lane; its input has the even column in the high nibble.
    swapped = (weight.codes << 4) | (weight.codes >> 4)
    for tile, outer, lane, word in [(0, 0, 0, 0), (1, 0, 13, 2), (2, 1, 31, 3), (0, 1, 6, 1)]:
        start = (outer * 8 + 2 * word) * 8
        columns = [start + lane % 4 + offset for offset in (0, 4, 8, 12)]
        v = [int(swapped[tile * 8 + lane // 4, column]) for column in columns]
        low = sum((byte >> 4) << (4 * i) for i, byte in enumerate(v))
        high = sum((byte & 0xF) << (16 + 4 * i) for i, byte in enumerate(v))
        assert int(words[tile, outer, lane, word]) & 0xFFFFFFFF == low | high


@pytest.mark.gpu
def test_tiles_equal_what_the_cuda_converter_returns() -> None:
    weight = pad_to_tiles(random_weight(40, 1100 // 64 * 64, 64))
    swapped = ((weight.codes << 4) | (weight.codes >> 4)).cuda()
    assert torch.equal(torch.ops.aten._convert_weight_to_int4pack(swapped, 8).cpu(), pack_tiles(weight.codes))


@pytest.mark.parametrize("shape", [(128, 64), (20, 96), (300, 1040)])
def test_torchao_rebuilds_nvfp4_as_we_mean_it(shape: tuple[int, int]) -> None:
    from torchao.prototype.safetensors.safetensors_support import unflatten_tensor_state_dict

    weight = NVFP4().random(*shape, torch.device("cpu"))
    convention = EXPORTS["torchao"]
    tensors = convention.tensors("m", weight)
    metadata = convention.file_metadata({"m": NVFP4()}, {"m": shape}, [])
    rebuilt, left = unflatten_tensor_state_dict(tensors, metadata)
    assert type(rebuilt["m.weight"]).__name__ == "NVFP4Tensor" and not left
    found = rebuilt["m.weight"].dequantize(torch.float32)
    assert torch.equal(found, weight.dequantize(torch.float32))
    scale = weight.scale.view(torch.uint8)
    assert torch.equal(unswizzle(swizzle(weight.scale), *scale.shape).view(torch.uint8), scale)


def test_torchao_rebuilds_the_tensors_we_flatten() -> None:
    from torchao.prototype.safetensors.safetensors_support import unflatten_tensor_state_dict

    weight = random_weight(20, 192, 64)
    convention = EXPORTS["torchao"]
    tensors = convention.tensors("m", weight)
    metadata = convention.file_metadata({"m": Int4(64)}, {"m": (20, 192)}, ["n.weight"])
    tensors["n.weight"] = torch.ones(3)
    rebuilt, left = unflatten_tensor_state_dict(tensors, metadata)
    assert type(rebuilt["m.weight"]).__name__ == "Int4TilePackedTo4dTensor"
    assert rebuilt["m.weight"].shape == (20, 192) and rebuilt["m.weight"].block_size == [1, 64]
    assert set(rebuilt) == {"m.weight", "n.weight"} and not left


@pytest.mark.parametrize("symmetric", [True, False])
def test_torchao_tiles_come_back_within_the_rounding_of_a_bf16_shift(
    quantized_pair: Callable, symmetric: bool
) -> None:
    pair = quantized_pair("qwen3", symmetric, lambda module: 32, export="torchao")
    quantized, plain = open_checkpoint(pair.quantized), open_checkpoint(pair.dequantized)
    for module, stored in convention_of(quantized).modules(quantized).items():
        weight = stored.read()
        # The shift, at most 8 scales, is rounded to bf16; without one nothing is.
        bound = 0 if symmetric else 8 * float(weight.scale.float().max()) * 2**-8
        error = (weight.dequantize(torch.float32) - plain.read(f"{module}.weight")).abs().max()
        assert float(error) <= bound


def test_torchao_refuses_what_its_int4_cannot_hold() -> None:
    convention = EXPORTS["torchao"]
    assert "groups of 32, 64, 128, 256, not 16" in convention.refuses(Int4(16), "m")
    assert "no single experts" in convention.refuses(Int4(64), "model.layers.0.mlp.experts.3.up_proj")
    assert "no embeddings" in convention.refuses(Int4(64), "m", is_embedding=True)
    assert convention.refuses(Int4(64), "m") is None
    with pytest.raises(ValueError, match="not 16"):
        convention.tensors("m", random_weight(8, 64, 16))


def test_torchaos_own_config_parser_reads_ours() -> None:
    from torchao.core.config import config_from_dict

    convention = EXPORTS["torchao"]
    declared = convention.quantization_config({"l.0.q": Int4(64)}, ["lm_head"])
    config = config_from_dict(declared["quant_type"]["default"])
    assert (config.group_size, config.int4_packing_format) == (64, "tile_packed_to_4d")
    specs = {"l.0.q": Int4(64), "l.1.q": Int4(64), "l.0.k": Int4(32)}
    several = convention.quantization_config(specs, [])
    by_name = config_from_dict(several["quant_type"]["default"]).fqn_to_config
    sizes = {
        name: next(c.group_size for p, c in by_name.items() if re.fullmatch(p.removeprefix("re:"), name))
        for name in ("l.0.q", "l.1.q", "l.0.k")
    }
    assert sizes == {"l.0.q": 64, "l.1.q": 64, "l.0.k": 32}
    json.dumps(several)
