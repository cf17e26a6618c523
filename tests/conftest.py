"""Fixtures that every room's tests share: the bundled checkpoint and its held-out text."""

from pathlib import Path

import pytest

# Sets OpenMP's threads as it does for the commands, which has to come before torch.
import scalegate.pipeline  # noqa: F401
import torch

ROOT = Path(__file__).resolve().parent.parent


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave GPU tests out where there is no GPU; `pytest -m gpu` on a machine with one runs them."""
    if torch.cuda.is_available():
        return
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu:
        config.hook.pytest_deselected(items=gpu)
        items[:] = [item for item in items if item not in gpu]


@pytest.fixture(scope="session")
def example_checkpoint() -> Path:
    """The bundled trained checkpoint: Qwen3 architecture, 5.2 M parameters, bfloat16, one shard."""
    return ROOT / "examples" / "qwen3-pycode-5m"


@pytest.fixture(scope="session")
def heldout_text() -> Path:
    """JSON lines of source code that the bundled checkpoint was not trained on."""
    return ROOT / "examples" / "heldout.jsonl"
