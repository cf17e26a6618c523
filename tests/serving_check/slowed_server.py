"""`pipeline serve` with an engine slowed on purpose: the negative control of the gate, and nothing else.

    python -P slowed_server.py STEP_TIME_FACTOR FROM_M CHECKPOINT [options of `pipeline serve`...]

A step in which at least FROM_M requests got a token takes STEP_TIME_FACTOR times its own time.
"""

import functools
import sys
import time
from pathlib import Path
from typing import Any

from scalegate.pipeline.cli.main import main
from scalegate.pipeline.commands import serve as serving
from scalegate.serving_check.engine.engine import Engine
from scalegate.serving_check.engine.options import EngineOptions
from scalegate.serving_check.engine.request import StepOutput


def build_slowed_engine(
    factor: float, from_m: int, folder: Path, options: EngineOptions, tokenizer: Any
) -> Engine:
    engine = serving.build_engine(folder, options, tokenizer)
    step = engine.step

    def slowed_step() -> list[StepOutput]:
        started = time.perf_counter()
        outputs = step()
        if len(outputs) >= from_m:
            # A sleep would end late on a busy machine, and slow it by more than was asked.
            until = started + (time.perf_counter() - started) * factor
            while time.perf_counter() < until:
                pass
        return outputs

    engine.step = slowed_step  # type: ignore[method-assign]
    return engine


if __name__ == "__main__":
    slowed = functools.partial(build_slowed_engine, float(sys.argv[1]), int(sys.argv[2]))
    serving.build_engine = slowed  # type: ignore[assignment]
    main(["serve", *sys.argv[3:]], prog_name="slowed_server.py")
