"""Triton kernels compiled for an older GPU and run on a newer one, whose driver translates their PTX.

mma.sync, cp.async and ldmatrix run as they are, and a kernel that needs more shared memory than the older GPU
has is refused. Import and call `pretend` before anything compiles. Not a bench by itself.
"""

import os
import tempfile
from pathlib import Path
from typing import Any

SHARED_KIB = {(8, 0): 163, (8, 6): 99, (8, 9): 99}
"""Of a CTA, by NVIDIA's table of compute capabilities."""


def pretend(major: int, minor: int) -> None:
    """Torch and Triton find a GPU of this compute capability from now on."""
    architecture = f"sm{major}{minor}"
    os.environ["TRITON_OVERRIDE_ARCH"] = architecture
    # Inductor's other processes, its own launcher and its cache would know nothing of this.
    os.environ |= {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_USE_STATIC_CUDA_LAUNCHER": "0"}
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(tempfile.gettempdir()) / f"inductor-{architecture}")
    import torch
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia import compiler, driver
    from triton.runtime.errors import OutOfResources

    knobs.runtime.override_arch = architecture
    torch.cuda.get_device_capability = lambda device=None: (major, minor)
    limit = SHARED_KIB[major, minor] * 1024

    def leave_to_the_driver(self: Any, source: str, metadata: Any, options: Any, capability: int) -> bytes:
        """Instead of the assembler's code, the PTX itself."""
        if metadata["shared"] > limit:
            raise OutOfResources(metadata["shared"], limit, f"shared memory of {metadata['name']}")
        if f".target sm_{major}{minor}" not in source:
            raise RuntimeError(f"{metadata['name']} was compiled for another architecture")
        return source.encode() + b"\0"

    compiler.CUDABackend.make_cubin = leave_to_the_driver
    driver.CudaDriver.get_current_target = lambda self: GPUTarget("cuda", major * 10 + minor, 32)
