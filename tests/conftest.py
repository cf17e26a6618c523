"""Fixtures that every room's tests share: the bundled checkpoint and its held-out text."""

import contextlib
import functools
import gc
import json
import re
import shutil
from pathlib import Path

import pytest

# Sets OpenMP's threads as it does for the commands, which has to come before torch.
import scalegate.pipeline  # noqa: F401
import torch
from safetensors.torch import load_file, save_file
from scalegate.pipeline.cli.forked_servers import servers_forked
from scalegate.pipeline.machine.tested_stack import WARNED

ROOT = Path(__file__).resolve().parent.parent
COMPARES = re.compile(r"\b(assert_close|allclose|isclose|norm|torch\.equal)\(")
"""What a file with tests of numbers has in it."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--zoo-runs", type=int, default=1, help="how often each fault of tests/zoo is tried")
    parser.addoption(
        "--zoo-in-use",
        action="store_true",
        help="try each fault that only a load as in use shows by itself, half a minute each",
    )


def pytest_configure(config: pytest.Config) -> None:
    """All processes of pytest-xdist fork servers from one process: its imports take six CPU seconds."""
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        forks = contextlib.ExitStack()
        forks.enter_context(servers_forked("embedded", "auto"))
        config.add_cleanup(forks.close)


@functools.cache
def compares_numbers(file: Path) -> bool:
    return COMPARES.search(file.read_text(encoding="utf-8")) is not None


def pytest_itemcollected(item: pytest.Item) -> None:
    """Tests of numbers are `numeric` without anybody's remembering it: `on_each_isa.py` runs them.

    Raises:
        pytest.UsageError: if a test is named by an address, which differs in each process of pytest-xdist.
    """
    if " at 0x" in item.name:
        raise pytest.UsageError(
            f"{item.nodeid}: give its parameters `ids` that are the same in every process"
        )
    if compares_numbers(item.path):
        item.add_marker(pytest.mark.numeric)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """What collecting makes stays until the end, so the garbage collector need not look through it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave GPU tests out where there is no GPU; `pytest -m gpu` on a machine with one runs them.

    What is marked `long` comes first: of two processes neither is then left with it when the other is done.
    """
    items.sort(key=lambda item: item.get_closest_marker("long") is None)
    if not torch.cuda.is_available():
        needing = [item for item in items if item.get_closest_marker("gpu")]
        if needing:
            config.hook.pytest_deselected(items=needing)
            items[:] = [item for item in items if not item.get_closest_marker("gpu")]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """A test's random tensors are the same, whichever tests came before it."""
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def suite_cache(tmp_path_factory: pytest.TempPathFactory):
    """What was measured on this machine before decides nothing here. No command looks, as its first model is
    loaded, whether packages are within the tested bounds: that takes as long as many a test.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SCALEGATE_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv(WARNED, "1")
        yield


@pytest.fixture(scope="session", autouse=True)
def forked_servers(suite_cache):
    """Servers that tests start on a CPU import nothing: each would take four CPU seconds over it."""
    with servers_forked("embedded", "auto"):
        yield


@pytest.fixture(scope="session")
def example_checkpoint() -> Path:
    """The bundled trained checkpoint: Qwen3 architecture, 5.2 M parameters, bfloat16, one shard."""
    return ROOT / "examples" / "qwen3-pycode-5m"


@pytest.fixture(scope="session")
def two_layers(example_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled checkpoint without its last two layers, for tests that do not depend on depth."""
    folder = shutil.copytree(example_checkpoint, tmp_path_factory.mktemp("shortened") / "two-layers")
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": 2, "layer_types": config["layer_types"][:2]}
    (folder / "config.json").write_text(json.dumps(config))
    left_out = tuple(f"model.layers.{layer}." for layer in (2, 3))
    tensors = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(left_out)}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="session")
def heldout_text() -> Path:
    """JSON lines of source code that the bundled checkpoint was not trained on."""
    return ROOT / "examples" / "heldout.jsonl"
