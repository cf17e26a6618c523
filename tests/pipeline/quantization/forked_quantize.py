"""What processes that quantize run, in tests and in the bench `resume.py`: a fork imports it by name."""

import os
import signal
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from scalegate.pipeline.commands.quantize import quantize
from scalegate.pipeline.quantization import write_shards


def quantize_alone(connection: Connection, source: Path, options: dict[str, Any]) -> None:
    quantize(source, **options)


def quantize_as_rank(
    connection: Connection,
    environment: dict[str, str],
    words: Sequence[Path | str],
    options: dict[str, Any],
    is_killed: bool,
) -> None:
    """`quantize(*words, **options)`; where `is_killed`, this process is killed at its second shard."""
    os.environ.update(environment)
    carry_out, wrote = write_shards._carry_out, set()

    def until_killed(job, task, known, writer):
        wrote.add(writer.path)
        if is_killed and len(wrote) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return carry_out(job, task, known, writer)

    write_shards._carry_out = until_killed
    quantize(*words, **options)
