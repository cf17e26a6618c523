"""What every weight format promises: its numbers can be cut and put together, and JSON holds its spec."""

import pytest
import torch
from scalegate.layouts.formats.all_formats import WEIGHT_FORMATS
from scalegate.layouts.formats.int4 import Int4
from scalegate.layouts.formats.weight_format import (
    WeightFormat,
    merge_rows,
    parameters,
    spec_from_json,
    spec_to_json,
)

CPU = torch.device("cpu")
N, K = 32, 512
SPECS = [spec for _, weight_format in WEIGHT_FORMATS.items() for spec in weight_format.variants()]
SPECS += [Int4(32, symmetric=True), Int4(K)]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.key)
def test_a_slice_of_the_weight_is_a_slice_of_its_values(spec: WeightFormat) -> None:
    weight = spec.random(N, K, CPU)
    values = weight.dequantize(torch.float32)
    assert values.shape == weight.shape == (N, K)
    assert torch.equal(weight.rows(8, 24).dequantize(torch.float32), values[8:24])
    half = K // 2 if K // 2 % spec.column_multiple == 0 else 0
    assert torch.equal(weight.columns(half, K).dequantize(torch.float32), values[:, half:])


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.key)
def test_rows_that_were_cut_are_merged_again(spec: WeightFormat) -> None:
    weight = spec.random(N, K, CPU)
    merged = merge_rows([weight.rows(0, 8), weight.rows(8, N)])
    assert merged is not None and merged.spec == spec
    assert torch.equal(merged.dequantize(torch.float32), weight.dequantize(torch.float32))


def test_weights_that_do_not_share_what_stands_for_all_of_them_are_not_merged() -> None:
    nvfp4 = WEIGHT_FORMATS["nvfp4"]()
    weight = nvfp4.random(N, K, CPU)
    assert merge_rows([weight, weight.with_tensors({"global_scale": torch.tensor(0.5)})]) is None
    assert merge_rows([weight, weight]) is not None


def test_weights_of_different_specs_are_not_merged() -> None:
    assert merge_rows([Int4(64).random(N, K, CPU), Int4(32).random(N, K, CPU)]) is None


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.key)
def test_json_holds_a_spec(spec: WeightFormat) -> None:
    assert spec_from_json(spec_to_json(spec)) == spec
    assert hash(spec_from_json(spec_to_json(spec))) == hash(spec)


def test_specs_are_told_apart_by_key_and_by_label() -> None:
    assert len({spec.key for spec in SPECS}) == len({spec.label for spec in SPECS}) == len(set(SPECS))


def test_the_nearest_spec_takes_the_shape_and_changes_as_little_as_it_has_to() -> None:
    spec = Int4(128, symmetric=True)
    assert spec.refuses(N, 96) == "K = 96 is no multiple of group size 128"
    nearest = spec.nearest(N, 96)
    assert nearest is not None and nearest.refuses(N, 96) is None
    assert parameters(nearest) == {"group_size": 32, "symmetric": True, "zero_point": "integer"}
    assert spec.nearest(N, 40) is None


def test_columns_are_cut_at_whole_groups_only() -> None:
    with pytest.raises(ValueError, match="at multiples of 128, not 64:512"):
        Int4(128).random(N, K, CPU).columns(64, 512)
