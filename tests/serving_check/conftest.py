"""One real server on the bundled checkpoint, shared by every test of this folder that only asks it things."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from scalegate.serving_check.adapters import Endpoint, SubprocessEndpoint

CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'tool' %}{{ raise_exception('no tools here') }}"
    "{% endif %}# {{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}# assistant: {% endif %}"
)


@pytest.fixture(scope="session")
def chat_checkpoint(example_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled checkpoint with a chat template, which it does not have of its own."""
    folder = tmp_path_factory.mktemp("checkpoint") / "pycode-chat"
    shutil.copytree(example_checkpoint, folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**config, "chat_template": CHAT_TEMPLATE}), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def serve_command():
    """The command that serves a checkpoint on this machine's CPU, on a port of its own choosing."""

    def command(checkpoint: Path, *options: str) -> list[str]:
        serve = [sys.executable, "-P", "-m", "scalegate.pipeline", "serve", str(checkpoint)]
        return [*serve, "--port", "0", "--device", "cpu", *options]

    return command


@pytest.fixture(scope="session")
def server(chat_checkpoint: Path, serve_command, tmp_path_factory: pytest.TempPathFactory):
    """An Endpoint: float32, 64 requests together, contexts of 512 tokens."""
    options = ["--served-model-name", "pycode", "--dtype", "float32", "--max-num-seqs", "64"]
    options += ["--max-model-len", "512", "--kv-cache-tokens", "16384"]
    log = tmp_path_factory.mktemp("server") / "log.txt"
    with SubprocessEndpoint(serve_command(chat_checkpoint, *options), "pycode", log=log) as endpoint:
        assert isinstance(endpoint, Endpoint)
        yield endpoint
