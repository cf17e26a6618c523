"""What every weight format keeps: slices, merges, JSON, sizes; and what each refuses."""

from dataclasses import FrozenInstanceError, replace
from itertools import pairwise

import pytest
import torch
from scalegate.base.errors import UserError
from scalegate.layouts.formats.all_formats import WEIGHT_FORMATS
from scalegate.layouts.formats.int4 import Int4, pack_nibbles, unpack_nibbles
from scalegate.layouts.formats.int8 import WHOLE_ROW, Int8
from scalegate.layouts.formats.nvfp4 import NVFP4
from scalegate.layouts.formats.unquantized import Unquantized, UnquantizedWeight
from scalegate.layouts.formats.weight_format import (
    Weight,
    WeightFormat,
    merge_rows,
    parameters,
    spec_from_json,
    spec_to_json,
    weight_of,
)
from scalegate.layouts.packing.layout import Experts, Problem

CPU = torch.device("cpu")
N, K = 24, 512
SPECS: list[WeightFormat] = list(
    dict.fromkeys(
        [
            *(spec for _, cls in WEIGHT_FORMATS.items() for spec in cls.variants()),
            *(
                Int4(size, zero_point=zero)
                for size in (16, 32, 64, 256)
                for zero in ("integer", "fractional")
            ),
            Int4(64, symmetric=True),
            Int8(64),
            Int8(32),
        ]
    )
)
STANDS_IN = {"iq2-xxs": "int4"}
"""The format of layers that cannot have the first one, where it is another one."""
EVERY = pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.key)
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def random(spec: WeightFormat, n: int = N, k: int = K) -> Weight:
    return spec.random(n, k, CPU)


def test_every_registered_format_is_at_test():
    assert {spec.name for spec in SPECS} == set(WEIGHT_FORMATS)


@EVERY
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_random_weight_has_the_shape_and_dtype_that_were_asked_for(spec: WeightFormat, dtype: torch.dtype):
    weight = random(spec)
    dense = weight.dequantize(dtype)
    assert weight.spec == spec and isinstance(weight, spec.weight_class)
    assert weight.shape == tuple(dense.shape) == (N, K) and dense.dtype is dtype
    assert dense.isfinite().all() and dense.abs().max() > 0
    assert torch.equal(dense, weight.dequantize(torch.float32).to(dtype)), "computed in fp32, rounded once"


@EVERY
@pytest.mark.parametrize("rows", [(0, 1), (0, N), (7, 19), (N - 1, N)])
def test_rows_of_a_weight_are_rows_of_what_it_stands_for(spec: WeightFormat, rows: tuple[int, int]):
    weight = random(spec)
    cut = weight.rows(*rows)
    assert cut.shape == (rows[1] - rows[0], K) and cut.spec == spec
    assert torch.equal(cut.dequantize(), weight.dequantize()[slice(*rows)])


@EVERY
@pytest.mark.parametrize("cuts", [(5,), (8, 9), (1, 2, 3)])
def test_weights_are_merged_one_below_the_other(spec: WeightFormat, cuts: tuple[int, ...]):
    """Those of a format with shared tensors share them, as parts of one weight do."""
    whole = random(spec)
    bounds = [0, *cuts, N]
    parts = [whole.rows(start, stop) for start, stop in pairwise(bounds)]
    merged = merge_rows(parts)
    assert merged is not None and merged.spec == spec and merged.shape == (N, K)
    assert torch.equal(merged.dequantize(), torch.cat([part.dequantize() for part in parts]))
    assert torch.equal(merged.dequantize(), whole.dequantize())
    assert not torch.equal(merge_rows(parts[::-1]).dequantize(), whole.dequantize()), "the order is theirs"


@EVERY
def test_a_weight_by_itself_is_merged_into_itself(spec: WeightFormat):
    weight = random(spec)
    assert torch.equal(merge_rows([weight]).dequantize(), weight.dequantize())


@EVERY
def test_weights_of_other_specs_widths_or_dtypes_are_not_merged(spec: WeightFormat):
    weight = random(spec)
    for other in SPECS:
        assert (merge_rows([weight, weight.rows(0, 4) if other == spec else random(other)]) is None) == (
            other != spec
        ), other
    assert merge_rows([weight, random(spec, N, 2 * K)]) is None
    name = "values" if isinstance(weight, UnquantizedWeight) else "scale"
    wide = weight.with_tensors({name: weight.tensors()[name].to(torch.float64)})
    assert merge_rows([weight, wide]) is None


def test_weights_that_do_not_share_what_stands_for_all_rows_are_not_merged():
    shared = [spec for spec in SPECS if spec.shared]
    assert NVFP4() in shared
    for spec in shared:
        weight = random(spec)
        for name in spec.shared:
            other = weight.with_tensors({name: weight.tensors()[name] * 2})
            assert merge_rows([weight, other]) is None
            assert merge_rows([other, other]) is not None


@EVERY
def test_specs_survive_json(spec: WeightFormat):
    value = spec_to_json(spec)
    assert value == {"format": spec.name, **parameters(spec)}
    assert spec_from_json(value) == spec
    assert value["format"] == spec.name, "reading it leaves it as it was"


def test_what_is_no_spec_is_refused_with_the_reason():
    with pytest.raises(UserError, match=r"unknown weight format 'int5'; choose one of: .*int4"):
        spec_from_json({"format": "int5"})
    with pytest.raises(ValueError, match=r"int4: .*bits"):
        spec_from_json({"format": "int4", "bits": 4})
    with pytest.raises(ValueError, match="multiple of 16"):
        spec_from_json({"format": "int4", "group_size": 40})


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"group_size": 8}, "at least 16, not 8"),
        ({"group_size": True}, "whole number"),
        ({"group_size": 64.0}, "whole number"),
        ({"group_size": 24}, "multiple of 16, not 24"),
        ({"symmetric": 1}, "true or false"),
        ({"zero_point": "float"}, "one of integer, fractional; not 'float'"),
        ({"zero_point": "fractional", "symmetric": True}, "exclude each other"),
    ],
)
def test_parameters_that_int4_cannot_have_are_refused(given: dict[str, object], reason: str):
    with pytest.raises(ValueError, match=reason):
        Int4(**given)


@pytest.mark.parametrize("size", [0, 16, 256, True, 64.0, "row"])
def test_int8_has_the_groups_that_other_engines_read(size: object):
    with pytest.raises(ValueError, match="one of 32, 64, 128, or -1 for whole rows; not"):
        Int8(size)


@EVERY
def test_specs_are_equal_by_their_parameters_and_stay_as_they_are(spec: WeightFormat):
    twin = type(spec)(**parameters(spec))
    assert twin == spec and hash(twin) == hash(spec) and {spec: 1}[twin] == 1
    assert [other for other in SPECS if other == spec] == [spec]
    for name in parameters(spec):
        with pytest.raises(FrozenInstanceError):
            setattr(spec, name, 16)


def test_keys_and_labels_tell_specs_apart():
    """Plans are filed by the key, and verdicts show the label."""
    assert len({spec.key for spec in SPECS}) == len({spec.label for spec in SPECS}) == len(SPECS)


def bits(*tensors: torch.Tensor) -> float:
    return sum(8.0 * tensor.nbytes for tensor in tensors) / (N * K)


@pytest.mark.parametrize("size", [16, 32, 128, 256])
def test_bits_of_int4_are_its_codes_scales_and_zero_points(size: int):
    """A scale is counted in 16 bits; so is a fractional zero point, and an integer one in four."""
    assert Int4(size, symmetric=True).bits_per_weight(N, K) == 4 + 16 / size
    for zero, kept in (("integer", 4 / 8), ("fractional", 16 / 32)):
        spec = Int4(size, zero_point=zero)
        weight = random(spec)
        # The neutral weight holds an integer zero in a byte, and a fractional one in fp32.
        expected = bits(weight.codes, weight.scale) + kept * bits(weight.zero_point)
        assert spec.bits_per_weight(N, K) == pytest.approx(expected, rel=1e-12)
    assert Int4(128).bits_per_weight(N, K) == 4.15625


@pytest.mark.parametrize("size", [32, 128, WHOLE_ROW])
def test_bits_of_int8_are_its_codes_and_scales(size: int):
    weight = random(Int8(size))
    assert Int8(size).bits_per_weight(N, K) == bits(weight.codes, weight.scale)
    assert Int8(128).bits_per_weight(N, K) == 8.125


def test_bits_of_the_others_are_what_their_tensors_take():
    weight = random(NVFP4())
    assert NVFP4().bits_per_weight(N, K) == pytest.approx(bits(*weight.tensors().values()), rel=1e-12)
    values = random(Unquantized()).values.to(torch.bfloat16)
    assert Unquantized().bits_per_weight(N, K) == bits(values) == 16


@EVERY
def test_bytes_in_a_checkpoint_are_about_those_of_the_bits(spec: WeightFormat):
    assert spec.nbytes(N, K) == pytest.approx(spec.bits_per_weight(N, K) * N * K / 8, rel=0.1)
    assert isinstance(spec.nbytes(N, K), int)


@EVERY
def test_a_width_that_a_spec_takes_is_not_refused_and_another_is(spec: WeightFormat):
    assert spec.refuses(N, K) is None
    if spec.column_multiple == 1:
        assert spec.refuses(3, 5) is None
        return
    odd = K + spec.column_multiple // 2
    assert f"K = {odd} is no multiple of" in (spec.refuses(N, odd) or "")


def test_the_nearest_spec_differs_in_its_groups_alone():
    spec = Int4(128, symmetric=True)
    assert spec.nearest(N, 96) == replace(spec, group_size=32)
    assert spec.nearest(N, 192) == replace(spec, group_size=64)
    assert spec.nearest(N, 512) == spec
    assert spec.nearest(N, 40) is None
    assert Int8(128).nearest(N, 192) == Int8(64)
    assert Int8(128).nearest(N, 40) == Int8(WHOLE_ROW) and Int8(128).nearest(N, 42) is None
    assert NVFP4().nearest(N, 40) is None
    assert Unquantized().nearest(N, 40) == Unquantized()


@EVERY
def test_the_nearest_spec_takes_the_shape(spec: WeightFormat):
    for k in (16, 48, 96, 640, 1100):
        nearest = spec.nearest(N, k)
        assert nearest is None or nearest.refuses(N, k) is None
        assert nearest is None or nearest.name == STANDS_IN.get(spec.name, spec.name)


@EVERY
def test_a_weight_is_its_spec_and_its_tensors(spec: WeightFormat):
    weight = random(spec)
    twin = weight_of(spec, weight.tensors())
    assert type(twin) is type(weight) and torch.equal(twin.dequantize(), weight.dequantize())
    moved = weight.to("meta")
    assert moved.shape == weight.shape
    assert {tensor.device.type for tensor in moved.tensors().values()} == {"meta"}


def test_nibbles_are_packed_low_first():
    codes = torch.randint(0, 16, (3, 8), dtype=torch.uint8)
    packed = pack_nibbles(codes)
    assert torch.equal(packed, codes[:, 0::2] + 16 * codes[:, 1::2])
    assert torch.equal(unpack_nibbles(packed), codes)


@EVERY
def test_a_problem_is_filed_under_everything_but_its_device(spec: WeightFormat):
    problem = Problem.of(random(spec), torch.bfloat16, CPU)
    assert str(problem) == f"{spec.key} {N}x{K} bfloat16"
    others = [
        replace(problem, spec=next(other for other in SPECS if other != spec)),
        replace(problem, n=N + 1),
        replace(problem, k=2 * K),
        replace(problem, dtype=torch.float16),
        replace(problem, experts=Experts(8, 2)),
        replace(problem, experts=Experts(8, 4)),
        replace(problem, batch_invariance="pin"),
    ]
    assert len({str(each) for each in (problem, *others)}) == len(others) + 1
    assert str(replace(problem, device=torch.device("cuda"))) == str(problem)
