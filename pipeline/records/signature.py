"""A detached signature over a verdict, made and checked with an SSH key by `ssh-keygen -Y`.

The verdict names the digest of everything else in a release, so signing it signs all.
"""

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ...base.atomic_files import atomic_path
from ...base.errors import UserError

NAMESPACE = "scalegate"
"""The namespace of our signatures: one made for another purpose, such as a commit, is not valid here."""
SUFFIX = ".sig"
FINGERPRINT = re.compile(r"key (SHA256:[A-Za-z0-9+/=]+)")
SECONDS = 120

State = Literal["unsigned", "good", "trusted", "unknown signer", "bad"]


@dataclass(frozen=True)
class Signature:
    """The state of the signature beside a file."""

    state: State
    """`good` fits the file, by whoever holds `key`; `trusted` is also by one of the allowed signers."""
    key: str | None = None
    """The key's fingerprint, `SHA256:…`."""
    signer: str | None = None
    """The key's name in the file of allowed signers."""
    problem: str | None = None


def require_key(key: Path) -> None:
    """Raise UserError if `key` cannot sign; this is called before the work whose result is to be signed."""
    if not key.expanduser().is_file():
        raise UserError(f"there is no key {key}; make one with `ssh-keygen -t ed25519 -f {key}`")
    _ssh_keygen()


def sign_file(path: Path, key: Path) -> Path:
    """Sign the file `path` with the private key (or the public half of one in the agent) in the file `key`.

    Return the signature's path, `path` with `.sig`. UserError where ssh-keygen refuses.
    """
    require_key(key)
    done = _run(["sign", "-q", "-f", str(key.expanduser()), "-n", NAMESPACE], path.read_bytes())
    if done.returncode or not done.stdout.startswith(b"-----BEGIN SSH SIGNATURE"):
        raise UserError(f"{path} could not be signed with {key}: {_said(done)}")
    with atomic_path(signature_path(path)) as partial:
        partial.write_bytes(done.stdout)
    return signature_path(path)


def check_signature(path: Path, signers: Path | None = None) -> Signature:
    """Check the signature beside the file `path`, and its signer if `signers` is given.

    signers: an allowed-signers file, as `ssh-keygen(1)` describes it
    """
    if signers is not None and not signers.expanduser().is_file():
        raise UserError(
            f"there is no file of allowed signers {signers}; see ALLOWED SIGNERS in ssh-keygen(1)"
        )
    signature = signature_path(path)
    if not signature.is_file():
        return Signature("unsigned")
    content, where = path.read_bytes(), ["-s", str(signature)]
    done = _run(["check-novalidate", "-n", NAMESPACE, *where], content)
    if done.returncode:
        return Signature("bad", problem=_said(done))
    fingerprint = FINGERPRINT.search(done.stdout.decode(errors="replace"))
    key = fingerprint[1] if fingerprint else None
    if signers is None:
        return Signature("good", key)
    trusted = ["-f", str(signers.expanduser())]
    found = _run(["find-principals", *where, *trusted], content)
    for name in found.stdout.decode(errors="replace").splitlines() if not found.returncode else []:
        if not _run(["verify", "-n", NAMESPACE, "-I", name, *where, *trusted], content).returncode:
            return Signature("trusted", key, name)
    return Signature("unknown signer", key)


def signature_path(path: Path) -> Path:
    return path.with_name(path.name + SUFFIX)


def _run(words: list[str], content: bytes) -> "subprocess.CompletedProcess[bytes]":
    try:
        return subprocess.run(
            [_ssh_keygen(), "-Y", *words], input=content, capture_output=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise UserError(f"ssh-keygen gave no answer within {SECONDS} s") from error


def _ssh_keygen() -> str:
    command = shutil.which("ssh-keygen")
    if command is None:
        raise UserError(
            "there is no ssh-keygen here, which signs and checks verdicts; install OpenSSH 8.2 or newer"
        )
    return command


def _said(done: "subprocess.CompletedProcess[bytes]") -> str:
    lines = (done.stderr or done.stdout).decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"ssh-keygen ended with status {done.returncode}"
