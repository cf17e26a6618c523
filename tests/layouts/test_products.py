"""Every layout that this machine can run gives `x @ dequantize().T`, on fresh random data."""

import importlib.util
from dataclasses import replace
from itertools import product

import pytest
import torch
from scalegate.base.installed import installed_package
from scalegate.layouts.formats.int4 import Int4
from scalegate.layouts.formats.int8 import WHOLE_ROW, Int8
from scalegate.layouts.formats.nvfp4 import NVFP4
from scalegate.layouts.formats.unquantized import Unquantized, UnquantizedWeight
from scalegate.layouts.formats.weight_format import Weight
from scalegate.layouts.modules.linear import QuantizedLinear
from scalegate.layouts.packing.all_layouts import LAYOUTS
from scalegate.layouts.packing.layout import IS_FOR, Experts, Problem
from scalegate.tests.rounding_bounds import CASTING_BOUND, product_bound

GEMLITE_SLACK = 2.0
"""In float16. Seen on an H200: 1.0e-3. Computed: to add up to 32 parts of a row with K=1024 to y in float16,
one after the other as gemlite does for a single row, 0.8e-3 to 1.2e-3."""
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture(autouse=True)
def first_configuration(monkeypatch):
    """What a package may choose from by timing, all of it compiled for every M, takes half an hour."""
    if importlib.util.find_spec("triton") is None:
        return
    from triton.runtime.autotuner import Autotuner

    pruned = Autotuner.prune_configs
    monkeypatch.setattr(Autotuner, "prune_configs", lambda tuner, kwargs: pruned(tuner, kwargs)[:1])


def relative_error(y: torch.Tensor, expected: torch.Tensor) -> float:
    return ((y.double() - expected).norm() / expected.norm()).item()


def random_weight(problem: Problem) -> Weight:
    return problem.spec.random(problem.n, problem.k, problem.device)


def serving(problem: Problem) -> list[str]:
    return [name for name, layout in LAYOUTS.items() if layout.refuses(problem) is None]


def bound(name: str, dtype: torch.dtype, k: int) -> float:
    if name == "gemlite" and dtype == torch.float16:
        return GEMLITE_SLACK * product_bound(dtype, k)
    return CASTING_BOUND if name == "cpu_int4_cast" else product_bound(dtype, k)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("zero_point", ["integer", "fractional"])
@pytest.mark.parametrize(
    ("group_size", "n", "k"),
    [(32, 24, 96), (64, 100, 192), (128, 256, 640), (128, 256, 1024), (128, 8, 128), (256, 48, 512)],
)
def test_int4_products_agree_with_float64(device, dtype, zero_point, group_size, n, k):
    problem = Problem(Int4(group_size, zero_point=zero_point), n, k, dtype, torch.device(device))
    names = serving(problem)
    # No kernel of ours or torch's multiplies INT4 by float32 on a GPU.
    assert len(names) >= (1 if (device, dtype) == ("cuda", torch.float32) else 2)
    weight = random_weight(problem)
    truth = weight.dequantize(torch.float64)
    for name in names:
        packed = LAYOUTS[name].pack(weight, dtype)
        x = torch.randn(33, k, device=device).to(dtype)
        expected = x.double() @ truth.T
        for m in (1, 2, 3, 4, 5, 8, 15, 16, 17, 33):
            # Whatever the allocator hands out next must not hold an answer already.
            poison = torch.full((m, n), float("nan"), dtype=dtype, device=device)
            del poison
            y = LAYOUTS[name].matmul(x[:m], packed)
            assert y.dtype is dtype and y.shape == (m, n), name
            # Few outputs are a small sample of the error: those of one row of the weight share its scales.
            slack = 1 if n > 8 and m * n >= 256 else 3
            assert relative_error(y, expected[:m]) <= slack * bound(name, dtype, k), (name, m)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nvfp4_products_agree_with_float64(device, dtype):
    problem = Problem(NVFP4(), 72, 176, dtype, torch.device(device))
    weight = random_weight(problem)
    names = serving(problem)
    assert "dequantize" in names
    for name in names:
        x = torch.randn(7, problem.k, device=device).to(dtype)
        y = LAYOUTS[name].matmul(x, LAYOUTS[name].pack(weight, dtype))
        expected = x.double() @ weight.dequantize(torch.float64).T
        assert relative_error(y, expected) <= bound(name, dtype, problem.k), name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("group_size", "k"), [(128, 640), (64, 192), (32, 96), (WHOLE_ROW, 172), (128, 512)])
def test_int8_products_agree_with_float64(device, dtype, group_size, k):
    problem = Problem(Int8(group_size), 72, k, dtype, torch.device(device))
    weight = random_weight(problem)
    names = serving(problem)
    assert {"dequantize", f"{'gpu' if device == 'cuda' else 'cpu'}_dequantized"} <= set(names)
    for name in names:
        x = torch.randn(7, k, device=device).to(dtype)
        y = LAYOUTS[name].matmul(x, LAYOUTS[name].pack(weight, dtype))
        expected = x.double() @ weight.dequantize(torch.float64).T
        assert relative_error(y, expected) <= bound(name, dtype, problem.k), name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_unquantized_products_agree_with_float64(device, dtype):
    problem = Problem(Unquantized(), 72, 170, dtype, torch.device(device))
    weight = UnquantizedWeight(Unquantized(), torch.randn(72, 170, device=device).to(dtype))
    first, *others = serving(problem)
    assert first == "torch_linear", "it is measured against, so nothing else may stand first"
    assert set(others) <= ({"cpu_onednn"} if device == "cpu" and dtype == torch.bfloat16 else set())
    x = torch.randn(7, problem.k, device=device).to(dtype)
    for name in (first, *others):
        y = LAYOUTS[name].matmul(x, LAYOUTS[name].pack(weight, dtype))
        assert relative_error(y, x.double() @ weight.values.double().T) <= product_bound(dtype, 170), name


def test_a_wrong_zero_point_is_seen_by_these_bounds():
    """Negative control: a weight off by one zero step in one group of one row in eight is not within them."""
    problem = Problem(Int4(32), 64, 256, torch.bfloat16, torch.device("cpu"))
    weight = random_weight(problem)
    zero = weight.zero_point.clone()
    zero[::8, 0] += 1
    wrong = replace(weight, zero_point=zero)
    x = torch.randn(8, 256).bfloat16()
    y = LAYOUTS["cpu_int4"].matmul(x, LAYOUTS["cpu_int4"].pack(wrong, torch.bfloat16))
    assert relative_error(y, x.double() @ weight.dequantize(torch.float64).T) > 2 * product_bound(
        torch.bfloat16, 256
    )


@pytest.mark.parametrize("bias", [True, False])
def test_a_module_stands_where_a_linear_stood(bias):
    problem = Problem(Int4(64), 100, 192, torch.bfloat16, torch.device("cpu"))
    weight = random_weight(problem)
    linear = torch.nn.Linear(192, 100, bias=bias, dtype=torch.bfloat16)
    linear.weight.data = weight.dequantize(torch.bfloat16)
    for name in serving(problem):
        packed = LAYOUTS[name].pack(weight, torch.bfloat16)
        module = QuantizedLinear(packed, linear.bias.data.clone() if bias else None)
        hidden = torch.randn(2, 9, 192, dtype=torch.bfloat16)
        for x in (hidden, hidden[:, -1:], hidden[:, -1], hidden[0, 0], hidden.transpose(0, 1)):
            with torch.inference_mode():
                y, expected = module(x), linear(x)
            assert y.shape == expected.shape and y.dtype is expected.dtype
            assert relative_error(y, expected.double()) < 8e-3, name


def test_packed_tensors_are_buffers_that_move_with_the_module():
    problem = Problem(Int4(64), 32, 64, torch.bfloat16, torch.device("cpu"))
    module = QuantizedLinear(LAYOUTS["cpu_int4"].pack(random_weight(problem), torch.bfloat16), None)
    assert set(dict(module.named_buffers())) == set(module.packed.tensors)
    moved = module.to("meta")
    assert {tensor.device.type for tensor in moved.packed.tensors.values()} == {"meta"}
    assert module.state_dict() == {}


@pytest.mark.parametrize("spec", [Int4(64), Int4(64, zero_point="fractional"), Int8(64), NVFP4()], ids=str)
def test_a_traced_graph_holds_the_product_of_every_layout(spec):
    problem = Problem(spec, 40, 128, torch.bfloat16, torch.device("cpu"))
    weight, x = random_weight(problem), torch.randn(2, 3, 128, dtype=torch.bfloat16)
    for name in serving(problem):
        module = QuantizedLinear(LAYOUTS[name].pack(weight, torch.bfloat16), None)
        torch._dynamo.reset()
        traced = torch.compile(module, backend="eager", fullgraph=True)
        with torch.inference_mode():
            assert torch.equal(traced(x), module(x)), name


def test_a_quantized_layer_takes_a_quarter_of_the_memory():
    problem = Problem(Int4(128), 1024, 1024, torch.bfloat16, torch.device("cpu"))
    packed = LAYOUTS["cpu_int4"].pack(random_weight(problem), torch.bfloat16)
    assert packed.nbytes < 0.27 * 1024 * 1024 * 2


def test_layouts_refuse_what_they_cannot_serve_and_say_why():
    on_cpu = Problem(NVFP4(), 64, 64, torch.bfloat16, torch.device("cpu"))
    assert "is for int4" in (LAYOUTS["cpu_int4"].refuses(on_cpu) or "")
    int4_on_cpu = Problem(Int4(64), 64, 64, torch.bfloat16, torch.device("cpu"))
    assert "CUDA" in (LAYOUTS["tinygemm"].refuses(int4_on_cpu) or "")
    assert "experts" in (LAYOUTS["cpu_int4"].refuses(replace(int4_on_cpu, experts=Experts(4, 2))) or "")
    assert "experts" in (LAYOUTS["dequantize_per_expert"].refuses(int4_on_cpu) or "")
    odd = Problem(Int4(48), 64, 96, torch.bfloat16, torch.device("cpu"))
    assert "48" in (LAYOUTS["cpu_int4"].refuses(odd) or "")
    with pytest.raises(TypeError, match="packs Int4Weight"):
        LAYOUTS["cpu_int4"].pack(random_weight(on_cpu), torch.bfloat16)


def test_what_a_layout_is_for_does_not_depend_on_shape_or_dtype():
    """`pipeline layout` does not name layouts whose refusal says what they are for: no shape changes that."""
    refused_for_shape = set()
    for (name, layout), spec in product(
        LAYOUTS.items(), (Int4(64), Int4(48), NVFP4(), Int8(32), Unquantized())
    ):
        sizes = [(n, k) for n, k in ((64, 192), (17, 960), (4096, 4096)) if spec.refuses(n, k) is None]
        refusals = {
            layout.refuses(Problem(spec, n, k, dtype, torch.device("cpu"))) or ""
            for (n, k), dtype in product(sizes, DTYPES)
        }
        kinds = {refusal for refusal in refusals if refusal.startswith(IS_FOR)}
        assert not kinds or kinds == refusals, (name, spec)
        if kinds != refusals and refusals != {""}:
            refused_for_shape.add(name)
    assert {"cpu_int4", "cpu_int4_cast"} <= refused_for_shape


def test_a_kernel_package_that_is_absent_is_named_with_its_installation():
    assert installed_package("torch") is None
    assert installed_package("no-such-kernels") == "package not installed: pip install no-such-kernels"


@pytest.mark.parametrize(
    ("group_size", "k", "columns"),
    [(128, 640, 512), (128, 11008, 512), (64, 192, 256), (256, 1536, 1024), (512, 1536, 1024)],
)
def test_gemlite_is_not_given_a_k_past_whose_end_it_reads(group_size, k, columns):
    problem = Problem(Int4(group_size), 256, k, torch.bfloat16, torch.device("cuda"))
    longer = replace(problem, k=k // columns * columns + columns)
    assert f"not a multiple of {columns}" in (LAYOUTS["gemlite"].refuses(problem) or "")
    assert "past" not in (LAYOUTS["gemlite"].refuses(longer) or "")


@pytest.mark.parametrize("name", ["humming", "gemlite"])
def test_third_party_kernels_are_never_taken_unmeasured(name):
    names = list(LAYOUTS)
    assert names.index(name) > names.index("dequantize")
