"""humming's kernels compiled for 8.0 and run on a Hopper GPU, whose driver translates their PTX.

humming 0.1.19 asks the driver which GPU is there and lets NVRTC make machine code for it. After `pretend` it
finds an 8.0, NVRTC makes PTX for 8.0, and the driver makes machine code of that for the GPU that is there.
Call it before humming compiles anything. Not a bench by itself.
"""

import ctypes
import os
from functools import cache
from pathlib import Path
from typing import Any

MAJOR, MINOR, SHARED_KIB = 8, 0, 163


@cache  # a second time, its program would start itself without end
def pretend(folder: Path) -> None:
    """Compiled code is kept in `folder`, which processes may share. humming's own cache does not know for
    which GPU a file is.
    """
    os.environ |= {"HUMMING_CACHE_DIR": str(folder / "cache"), "HUMMING_COMPILER": "nvrtc"}
    from humming.device import DeviceInfo
    from humming.jit import compiler

    found: dict[str, Any] = {"sm_major": MAJOR, "sm_minor": MINOR, "sm_version": 10 * MAJOR + MINOR}
    found |= {"max_smem_size": SHARED_KIB * 1024, "max_smem_size_kb": float(SHARED_KIB)}
    for name, value in found.items():
        setattr(DeviceInfo, name, property(lambda self, value=value: value))
    to_ptx = folder / f"nvrtc_to_ptx_{os.getpid()}"
    to_ptx.write_text(f'#!/bin/sh\nexec "{compiler.may_build_nvrtc_compile_binary()}" --ptx "$@"\n')
    to_ptx.chmod(0o755)
    compiler.may_build_nvrtc_compile_binary = lambda: str(to_ptx)
    compile_for = compiler.NVRTCCompiler._compile.__func__

    def compile_and_translate(
        cls: Any, source: str, into: Path, sm_version: str, expression: str, flags: list[str]
    ) -> tuple[int, str, str]:
        flags = [flag.replace("-architecture=sm_", "-architecture=compute_") for flag in flags]
        done = compile_for(cls, source, into, sm_version, expression, flags)
        if done[0] == 0:
            translate(Path(into) / "kernel_tmp.cubin")
        return done

    compiler.NVRTCCompiler._compile = classmethod(compile_and_translate)


def translate(path: Path) -> None:
    """Replace PTX in a file by the driver's machine code for it."""
    import torch
    from cuda.bindings import driver

    torch.cuda.synchronize()  # makes the GPU's context this thread's
    ptx = path.read_bytes()
    if f".target sm_{MAJOR}{MINOR}".encode() not in ptx:
        raise RuntimeError(f"{path} was compiled for another architecture")

    def checked(result: tuple[Any, ...]) -> tuple[Any, ...]:
        if result[0] != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"the driver does not translate {path}: {result[0]}")
        return result[1:]

    (state,) = checked(driver.cuLinkCreate(0, [], []))
    kind = driver.CUjitInputType.CU_JIT_INPUT_PTX
    checked(driver.cuLinkAddData(state, kind, ptx, len(ptx), b"humming", 0, [], []))
    cubin, size = checked(driver.cuLinkComplete(state))
    path.write_bytes(ctypes.string_at(int(cubin), int(size)))
    checked(driver.cuLinkDestroy(state))
