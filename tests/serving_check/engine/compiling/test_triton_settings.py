"""Triton's settings before the first kernel: those of torch's compiler, whichever a release has."""

import pytest
from scalegate.serving_check.engine.compiling import triton_settings
from torch._inductor.runtime import compile_tasks

MAKERS = ("_set_triton_ptxas_path", "_set_triton_libdevice_path")


@pytest.mark.parametrize("missing", [(), MAKERS[:1], MAKERS])
def test_what_torch_would_set_is_set(missing: tuple[str, ...], monkeypatch):
    called = []
    for name in MAKERS:
        if name in missing:
            monkeypatch.delattr(compile_tasks, name, raising=False)
        else:
            monkeypatch.setattr(compile_tasks, name, lambda name=name: called.append(name), raising=False)
    triton_settings.settle()
    assert called == [name for name in MAKERS if name not in missing]
