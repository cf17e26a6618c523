"""Whether a command's servers are forked from a process that has already imported what they need.

It is called before the command's own imports, which take as long as starting the fork server, so that both
run at the same time.
"""

import os
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from ...serving_check.adapters.all_engines import DEFAULT_ENGINE
from ...serving_check.adapters.placement import VISIBLE
from ...serving_check.engine.options import AUTO
from ...serving_check.server.fork_server import ADDRESS, fork_server

ROOT = __package__.partition("pipeline")[0]
NEEDED = (
    "transformers.generation.utils",
    f"{ROOT}serving_check.engine.engine",
    f"{ROOT}pipeline.model_loader.load_model",
    f"{ROOT}pipeline.conventions.kv_cache",
    f"{ROOT}kernels.attention.paged.cpu_decode",
    f"{ROOT}serving_check.engine.dense.step",
)
GPUS = ("/dev/nvidiactl", "/dev/kfd")
"""Device files of NVIDIA's and of AMD's driver."""


def servers_forked(engine: str, device: str | None) -> AbstractContextManager[None]:
    """Inside the `with` block, our own servers on a CPU start in a fifth of the CPU time."""
    forks = engine == DEFAULT_ENGINE and sys.platform == "linux" and _is_cpu(device or AUTO)
    return fork_server(NEEDED) if forks and ADDRESS not in os.environ else nullcontext()


def _is_cpu(device: str) -> bool:
    if device != AUTO:
        return device.startswith("cpu")
    hidden = os.environ.get(VISIBLE) in ("", "-1")
    return hidden or not any(Path(gpu).exists() for gpu in GPUS)
