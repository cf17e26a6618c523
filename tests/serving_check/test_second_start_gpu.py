"""A second start on a GPU compiles no kernel that the first one has compiled: what it took is on disk."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from scalegate.pipeline.served_checkpoint import build_engine
from scalegate.serving_check.engine.jit_monitor import JitMonitor
from scalegate.serving_check.engine.options import EngineOptions

pytestmark = pytest.mark.gpu


def test_a_second_start_compiles_no_kernel(example_checkpoint: Path, tmp_path: Path):
    environment = os.environ | {
        name: str(tmp_path / name) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    }
    command = [sys.executable, "-P", __file__, str(example_checkpoint)]
    first, second = (
        json.loads(subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True).stdout)
        for _ in range(2)
    )
    assert any("_sample" in kernel for kernel in first), first
    assert second == []


def main(checkpoint: Path) -> None:
    """Print the kernels that Triton compiles from here to a warm engine."""
    monitor = JitMonitor()
    monitor.arm()
    sizes = {"max_num_seqs": 2, "max_model_len": 256, "kv_cache_tokens": 1024}
    engine = build_engine(checkpoint, EngineOptions(device="cuda", **sizes))
    engine.warm_up(progress=False)
    print(json.dumps([event.name for event in monitor.take() if event.kind == "triton compilation"]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
