"""Which kernels of ours are said to have run on which GPUs."""

import pytest
import torch
from scalegate.layouts.choosing.tried import OwnKernel, remark, tried
from scalegate.layouts.packing.all_layouts import LAYOUTS
from scalegate.layouts.packing.portable import PortableLayout

HOPPER, ADA = (9, 0), (8, 9)
OTHERS = ("torch_linear", "tinygemm", "dequantize", "cpu_int4", "cpu_int4_per_expert")


def test_what_we_ran_on_hopper_is_compiled_only_elsewhere():
    own = {name: layout for name, layout in LAYOUTS.items() if isinstance(layout, OwnKernel)}
    assert {"swap_ab", "iq2_xxs", "invariant_linear", "grouped_int4", "nvfp4_portable"} <= own.keys()
    for name, layout in own.items():
        on_hopper = "compiled only" if isinstance(layout, PortableLayout) else "run"
        assert (tried(layout, HOPPER), tried(layout, ADA)) == (on_hopper, "compiled only"), name


@pytest.mark.parametrize("name", OTHERS)
def test_nothing_is_said_of_the_kernels_of_others_or_of_a_cpu(name: str):
    assert tried(LAYOUTS[name], HOPPER) is None


def test_translation_is_a_word_of_its_own():
    layout = PortableLayout(LAYOUTS["int4_portable"].packing)
    layout.translated_for = (ADA,)
    assert [tried(layout, capability) for capability in (ADA, HOPPER)] == [
        "run through translation",
        "compiled only",
    ]


def test_a_chosen_layout_is_remarked_on_only_where_we_never_ran_it(monkeypatch):
    layout, gpu = LAYOUTS["grouped_int4"], torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: ADA)
    assert "compiled only" in remark(layout, gpu)
    assert remark(LAYOUTS["tinygemm"], gpu) == ""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: HOPPER)
    assert remark(layout, gpu) == remark(layout, torch.device("cpu")) == ""
