"""The command that serves a checkpoint with vLLM, for those who validate on the engine they deploy."""

import shutil
import socket
from collections.abc import Sequence
from pathlib import Path

from ...layouts.errors import UserError
from .subprocess_endpoint import SubprocessEndpoint

HOST = "127.0.0.1"


def vllm_endpoint(
    model: str,
    *,
    log: Path,
    max_num_seqs: int = 128,
    max_model_len: int | None = None,
    dtype: str | None = None,
    extra_arguments: Sequence[str] = (),
    executable: str = "vllm",
) -> SubprocessEndpoint:
    """`vllm serve MODEL` on a free loopback port, with prefix caching off, which would flatter repeats."""
    if shutil.which(executable) is None:
        raise UserError(
            f"there is no {executable!r} command here; install vLLM in an environment of its own "
            "and give its path, or start it yourself and pass its URL"
        )
    port = free_port()
    command = [executable, "serve", model, "--host", HOST, "--port", str(port), "--no-enable-prefix-caching"]
    command += ["--max-num-seqs", str(max_num_seqs)]
    if max_model_len is not None:
        command += ["--max-model-len", str(max_model_len)]
    if dtype is not None:
        command += ["--dtype", dtype]
    return SubprocessEndpoint(
        [*command, *extra_arguments], f"vllm {model}", log=log, base_url=f"http://{HOST}:{port}"
    )


def free_port(host: str = HOST) -> int:
    """A port that was free a moment ago; only for engines that cannot bind port 0 and say what they got."""
    with socket.create_server((host, 0)) as server:
        return int(server.getsockname()[1])
