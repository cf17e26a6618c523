"""The files of a release: every file that a push sends, with its size and digests.

`push.py` decides whether the release may be sent; `hub/` and `folder_target.py` send it.
"""

import hashlib
import io
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ...serving_check.evidence.verdict import Verdict
from ..records.artifact import MANIFEST_NAME, REPORT_FOLDER, SIGNATURE_NAME, VERDICT_NAME, Artifact
from ..records.file_digests import sha256_of

CARD_NAME = "README.md"
CHUNK = 1 << 20


@dataclass(frozen=True)
class BundleFile:
    """One file of a release: its name in the release, its content, and where the content comes from."""

    path: str
    size: int
    sha256: str
    source: Path | bytes

    def open(self) -> BinaryIO:
        return io.BytesIO(self.source) if isinstance(self.source, bytes) else open(self.source, "rb")

    def read(self, start: int, length: int) -> bytes:
        with self.open() as file:
            file.seek(start)
            return file.read(length)

    def git_oid(self) -> str:
        """Return the sha1 under which git, and so the Hub, files this content."""
        digest = hashlib.sha1(f"blob {self.size}\0".encode(), usedforsecurity=False)
        with self.open() as file:
            while chunk := file.read(CHUNK):
                digest.update(chunk)
        return digest.hexdigest()


def collect_bundle(folder: Path, artifact: Artifact, verdict: Verdict, card: str) -> list[BundleFile]:
    """Return all files of the release in `folder`, weights first, the manifest last; all are bound by
    `verdict`.
    """
    files = [
        BundleFile(name, record.size, record.sha256, folder / name) for name, record in artifact.files.items()
    ]
    files.sort(key=lambda file: (-file.size, file.path))
    signed = (folder / SIGNATURE_NAME).is_file()
    for name, sha256 in sorted(verdict.report.items()):
        path = folder / REPORT_FOLDER / name
        # The digest that was checked, not one taken now: what changed since is refused when it is sent.
        files.append(BundleFile(f"{REPORT_FOLDER}/{name}", path.stat().st_size, sha256, path))
    for name in [VERDICT_NAME, *([SIGNATURE_NAME] if signed else [])]:
        files.append(_from_path(folder, name))
    content = card.encode()
    files.append(BundleFile(CARD_NAME, len(content), hashlib.sha256(content).hexdigest(), content))
    files.append(_from_path(folder, MANIFEST_NAME))
    return files


def report_files(verdict: Verdict) -> list[str]:
    """Return the gate's report (plots, page) by path inside the release, sorted."""
    return sorted(f"{REPORT_FOLDER}/{name}" for name in verdict.report)


def bundle_digest(files: list[BundleFile]) -> str:
    """Return one sha256 over all names and contents: two releases are the same if it is equal."""
    digest = hashlib.sha256()
    for file in sorted(files, key=lambda file: file.path):
        digest.update(f"{file.path}\0{file.sha256}\n".encode())
    return digest.hexdigest()


def _from_path(folder: Path, name: str) -> BundleFile:
    path = folder / name
    return BundleFile(name, path.stat().st_size, sha256_of(path), path)
