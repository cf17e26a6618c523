"""gemlite's kernels compiled for 8.0 and run on a Hopper GPU, whose driver translates their PTX.

gemlite 0.6.0 reads from the driver how much shared memory a tile may take, and from the GPU's name which of
its tables of tiles is loaded. After `pretend`, which comes after `older_gpu.pretend`, it finds an A100's
shared memory and table; what the table does not have it tunes itself. Not a bench by itself.
"""

import sys
from pathlib import Path

SHARED_KIB = 163
TABLE = "a100.json"


def pretend() -> None:
    import gemlite

    for name, module in list(sys.modules.items()):
        if name.startswith("gemlite.") and hasattr(module, "get_gpu_shared_memory"):
            module.get_gpu_shared_memory = lambda: SHARED_KIB * 1024  # type: ignore[attr-defined]
    if not gemlite.load_config(str(Path(gemlite.__file__).parent / "configs" / TABLE)):
        raise RuntimeError(f"gemlite has no table {TABLE}")
