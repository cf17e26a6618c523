"""Commands in processes of their own that need not import torch again: each is a fork of one that has.

What reads the environment when it is imported, as the Hub client does, is imported by the command itself.
"""

import gc
import multiprocessing
import os
import sys
import threading
from pathlib import Path
from typing import NamedTuple

# A process has one such server, which imports what its first user names: nobody else in the tests uses it.
FORKS = multiprocessing.get_context("forkserver")
# `scalegate.pipeline` sets OpenMP's threads, which has to come before torch. None imports the Hub client.
FORKS.set_forkserver_preload(
    [
        "scalegate.pipeline",
        "torch",
        "scalegate.pipeline.publishing.examination",
        "scalegate.pipeline.publishing.reproduce",
        "jinja2",
        "httpx",
        "httpx2",
    ]
)


def run_command(words: list[str], environment: dict[str, str], folder: Path, output: Path) -> None:
    """`pipeline WORDS` in this process, its output in `output`.out and `output`.err."""
    gc.freeze()  # What was imported before the fork stays.
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for descriptor, suffix in ((1, ".out"), (2, ".err")):
        with open(output.with_suffix(suffix), "wb") as file:
            os.dup2(file.fileno(), descriptor)
    assert "huggingface_hub" not in sys.modules, "the Hub client was imported before HF_ENDPOINT was set"
    from scalegate.pipeline.cli.main import main

    main(words, prog_name="pipeline")


class CommandResult(NamedTuple):
    returncode: int | None
    stdout: str
    stderr: str


class ForkedCommand:
    """One command that runs, with what `subprocess.Popen` has of use."""

    def __init__(self, words: list[str], environment: dict[str, str], folder: Path, output: Path):
        self._output = output
        self._process = FORKS.Process(target=run_command, args=(words, environment, folder, output))
        self._process.start()
        self._ending = threading.Lock()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout: float | None = None) -> None:
        """From any thread: the exit status comes through a pipe, which only one of them may read."""
        with self._ending:
            self._process.join(timeout)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """(standard output, standard error) once it has ended."""
        self.wait(timeout)
        out, err = (
            self._output.with_suffix(suffix).read_text(encoding="utf-8") for suffix in (".out", ".err")
        )
        return out, err
