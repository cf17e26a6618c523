"""`pipeline serve` with an engine that compiles in traffic: the negative control of the compilation check.

    python -P recompiling_server.py CHECKPOINT [options of `pipeline serve`...]

`specialized_on_a_size` is compiled anew for every number of requests that get a token; on a CPU warm-up meets
powers of two only.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from scalegate.pipeline.cli.main import main
from scalegate.pipeline.commands import serve as serving
from scalegate.serving_check.engine.engine import Engine
from scalegate.serving_check.engine.options import EngineOptions
from scalegate.serving_check.engine.request import StepOutput


@torch.compile(backend="eager", dynamic=False)
def specialized_on_a_size(values: torch.Tensor) -> torch.Tensor:
    return values * 2


def build_recompiling_engine(folder: Path, options: EngineOptions, tokenizer: Any) -> Engine:
    engine = serving.build_engine(folder, options, tokenizer)
    step = engine.step

    def compiling_step() -> list[StepOutput]:
        outputs = step()
        specialized_on_a_size(torch.ones(len(outputs)))
        return outputs

    engine.step = compiling_step  # type: ignore[method-assign]
    return engine


if __name__ == "__main__":
    # Processes are forked where what is pickled is named by its module, which runs here under another name.
    from scalegate.tests.serving_check.server.recompiling_server import build_recompiling_engine as build

    serving.build_engine = build  # type: ignore[assignment]
    main(["serve", *sys.argv[1:]], prog_name="recompiling_server.py")
