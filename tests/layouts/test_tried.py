"""Which kernels of ours are said to have run on which GPUs."""

import pytest
import torch
from scalegate.layouts.choosing.tried import OwnKernel, remark, tried
from scalegate.layouts.packing.all_layouts import LAYOUTS

HOPPER, ADA, AMPERE = (9, 0), (8, 9), (8, 0)
OTHERS = ("torch_linear", "tinygemm", "dequantize", "cpu_int4", "cpu_int4_per_expert")


TRANSLATED = (
    "int4_portable", "nvfp4_portable", "int8_portable", "iq2_portable", "fp8_portable", "int8_inputs",
    "grouped_unquantized", "grouped_int4", "grouped_nvfp4", "grouped_dequantize",
)  # fmt: skip


def test_what_we_ran_on_hopper_is_compiled_only_elsewhere_unless_it_was_translated():
    own = {name: layout for name, layout in LAYOUTS.items() if isinstance(layout, OwnKernel)}
    never = own.pop("nvfp4_scaled")
    assert tried(never, HOPPER) == tried(never, (10, 0)) == "compiled only"
    assert {"swap_ab", "iq2_xxs", "invariant_linear", "fp8_scaled", "grouped_fp8", *TRANSLATED} <= own.keys()
    for name, layout in own.items():
        on_ada = "run through translation" if name in TRANSLATED else "compiled only"
        assert (tried(layout, HOPPER), tried(layout, ADA)) == ("run", on_ada), name
    assert tried(own["grouped_mxfp4"], AMPERE) == "run through translation"
    assert tried(own["grouped_fp8"], AMPERE) == "compiled only"


@pytest.mark.parametrize("name", OTHERS)
def test_nothing_is_said_of_the_kernels_of_others_or_of_a_cpu(name: str):
    assert tried(LAYOUTS[name], HOPPER) is None


def test_a_chosen_layout_is_remarked_on_only_where_we_never_ran_it(monkeypatch):
    layout, gpu = LAYOUTS["grouped_fp8"], torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: ADA)
    assert "compiled only" in remark(layout, gpu)
    assert "run through translation" in remark(LAYOUTS["grouped_int4"], gpu)
    assert remark(LAYOUTS["tinygemm"], gpu) == ""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: HOPPER)
    assert remark(layout, gpu) == remark(layout, torch.device("cpu")) == ""
