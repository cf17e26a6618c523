"""`pipeline` commands in processes of their own, forked from the suite's fork server, which imported torch.

What a command knows of plugins it has from its environment, like one that a user starts.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

from scalegate.serving_check.server.fork_server import Process, start_process


def run_pipeline(
    *words: object, environment: dict[str, str], folder: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """`pipeline WORDS` in `folder`, until it ends."""
    given = [*map(str, words)]
    with tempfile.TemporaryDirectory() as outputs:
        with running_pipeline(given, Path(outputs), environment, folder) as process:
            process.join()
        assert process.exitcode is not None
        out, err = ((Path(outputs) / name).read_text() for name in ("out", "err"))
        return subprocess.CompletedProcess(given, process.exitcode, out, err)


@contextlib.contextmanager
def running_pipeline(
    words: list[str], outputs: Path, environment: dict[str, str], folder: Path | None = None
) -> Iterator[Process]:
    """`pipeline WORDS` in `folder`, which writes its output into the files `out` and `err` of `outputs`."""
    connection, process = start_process(
        _main, words, environment, folder or Path.cwd(), outputs / "out", outputs / "err", name="pipeline"
    )
    with connection:
        yield process


def _main(
    connection: Connection, words: list[str], environment: dict[str, str], folder: Path, out: Path, err: Path
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for descriptor, path in ((1, out), (2, err)):
        with open(path, "wb") as file:
            os.dup2(file.fileno(), descriptor)
    from scalegate.pipeline.cli.main import main

    status: int | str | None = 0
    try:
        main(words, prog_name="pipeline")
    except SystemExit as end:
        status = end.code
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status if isinstance(status, int) else 0 if status is None else 1)
