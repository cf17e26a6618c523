"""Checking a commit against the release it should hold: every file's size and digest, and stored bytes.

The digests come from the Hub's index and the bytes from its storage; both must agree with ours.
"""

from huggingface_hub import HfApi

from ....base.errors import UserError
from ....base.progress import progress_bar
from ..bundle import BundleFile
from .repository import list_files, read_bytes

WINDOW = 64 * 1024
"""Bytes read back from the beginning, the middle and the end of each file; smaller files are read whole."""


def differences(
    api: HfApi, repo_id: str, commit: str, files: list[BundleFile], progress: bool = True
) -> list[str]:
    """Return one line for each file that differs at `commit` from the local file; empty if there is none."""
    remote = list_files(api, repo_id, commit)
    problems = []
    for file in progress_bar(files, desc="read back", unit="file", shown=progress):
        if file.path not in remote:
            problems.append(f"{file.path}: not there")
        elif remote[file.path].size != file.size:
            problems.append(f"{file.path}: {remote[file.path].size} bytes, {file.size} sent")
        elif not remote[file.path].is_same_as(file):
            problems.append(f"{file.path}: another digest than the file that was sent")
        else:
            for start, length in windows(file.size):
                if read_bytes(api, repo_id, commit, file.path, start, length) != file.read(start, length):
                    problems.append(f"{file.path}: stored bytes {start}..{start + length} differ")
                    break
    return problems


def windows(size: int) -> list[tuple[int, int]]:
    """Return (start, length) of the parts to read back from a file of `size` bytes."""
    if size <= 3 * WINDOW:
        return [(0, size)] if size else []
    return [(0, WINDOW), (size // 2, WINDOW), (size - WINDOW, WINDOW)]


def require_same(api: HfApi, repo_id: str, commit: str, files: list[BundleFile], progress: bool) -> None:
    problems = differences(api, repo_id, commit, files, progress)
    if problems:
        raise UserError(
            f"{repo_id} does not give back what was sent, at commit {commit}:\n  "
            + "\n  ".join(problems[:10])
            + "\nIts visibility was not changed. Push again; if that does not help, push to a new repository"
        )
