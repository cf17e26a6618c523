"""Which kernels of ours are said to have run on which GPUs."""

import pytest
import torch
from scalegate.layouts.choosing.tried import OwnKernel, remark, tried
from scalegate.layouts.packing.all_layouts import LAYOUTS
from scalegate.layouts.packing.portable import PortableLayout

HOPPER, ADA = (9, 0), (8, 9)
OTHERS = ("torch_linear", "tinygemm", "dequantize", "cpu_int4", "cpu_int4_per_expert")


def test_what_we_ran_on_hopper_is_compiled_only_elsewhere_unless_it_was_translated():
    own = {name: layout for name, layout in LAYOUTS.items() if isinstance(layout, OwnKernel)}
    for never in [own.pop(name) for name in ("nvfp4_scaled", "grouped_mxfp4", "mxfp4_portable")]:
        assert tried(never, HOPPER) == tried(never, (10, 0)) == "compiled only"
    assert {"swap_ab", "iq2_xxs", "invariant_linear", "grouped_int4", "nvfp4_portable"} <= own.keys()
    for name, layout in own.items():
        on_ada = "run through translation" if isinstance(layout, PortableLayout) else "compiled only"
        assert (tried(layout, HOPPER), tried(layout, ADA)) == ("run", on_ada), name


@pytest.mark.parametrize("name", OTHERS)
def test_nothing_is_said_of_the_kernels_of_others_or_of_a_cpu(name: str):
    assert tried(LAYOUTS[name], HOPPER) is None


def test_a_chosen_layout_is_remarked_on_only_where_we_never_ran_it(monkeypatch):
    layout, gpu = LAYOUTS["grouped_int4"], torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: ADA)
    assert "compiled only" in remark(layout, gpu)
    assert remark(LAYOUTS["tinygemm"], gpu) == ""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: HOPPER)
    assert remark(layout, gpu) == remark(layout, torch.device("cpu")) == ""
