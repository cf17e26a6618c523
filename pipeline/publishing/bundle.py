"""What a release consists of: every file that a push sends, with its size and digests.

Not for deciding whether it may be sent (`push.py`), nor for sending it (`hub/`, `folder_target.py`).
"""

import hashlib
import io
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ...layouts.files import PARTIAL_SUFFIX
from ...layouts.outside_names import file_refusal, name_refusal
from ..artifact import MANIFEST_NAME, VERDICT_NAME, Artifact, sha256_of

CARD_NAME = "README.md"
REPORT_FOLDER = "serving_check"
REPORT_SUFFIXES = (".html", ".png", ".svg", ".json")
CHUNK = 1 << 20


@dataclass(frozen=True)
class BundleFile:
    """One file of a release: where it goes, what it holds, and where that comes from."""

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
        """The sha1 under which git, and so the Hub, files this content."""
        digest = hashlib.sha1(f"blob {self.size}\0".encode(), usedforsecurity=False)
        with self.open() as file:
            while chunk := file.read(CHUNK):
                digest.update(chunk)
        return digest.hexdigest()


def collect_bundle(folder: Path, artifact: Artifact, card: str) -> list[BundleFile]:
    """All files of the release in `folder`, weights first, the manifest last."""
    files = [
        BundleFile(name, record.size, record.sha256, folder / name) for name, record in artifact.files.items()
    ]
    files.sort(key=lambda file: (-file.size, file.path))
    for name in [*report_files(folder), VERDICT_NAME]:
        files.append(_from_path(folder, name))
    content = card.encode()
    files.append(BundleFile(CARD_NAME, len(content), hashlib.sha256(content).hexdigest(), content))
    files.append(_from_path(folder, MANIFEST_NAME))
    return files


def report_files(folder: Path) -> list[str]:
    """The gate's report (plots, page) by path inside `folder`, sorted."""
    return sorted(name for name, reason in _in_report_folder(folder).items() if reason is None)


def left_out_of_report(folder: Path) -> dict[str, str]:
    """What else lies in the report's folder, by path inside `folder`, with the reason that it is not sent."""
    return {name: reason for name, reason in sorted(_in_report_folder(folder).items()) if reason is not None}


def _in_report_folder(folder: Path) -> dict[str, str | None]:
    names = [path.relative_to(folder).as_posix() for path in (folder / REPORT_FOLDER).glob("*")]
    return {
        name: file_refusal(folder, name) or name_refusal(name) or _not_of_a_report(name)
        for name in names
        if not name.endswith(PARTIAL_SUFFIX) and not Path(name).name.startswith(".")
    }


def _not_of_a_report(name: str) -> str | None:
    return None if name.endswith(REPORT_SUFFIXES) else "not a kind of file that a report consists of"


def bundle_digest(files: list[BundleFile]) -> str:
    """One sha256 over all names and contents: what makes two releases the same release."""
    digest = hashlib.sha256()
    for file in sorted(files, key=lambda file: file.path):
        digest.update(f"{file.path}\0{file.sha256}\n".encode())
    return digest.hexdigest()


def _from_path(folder: Path, name: str) -> BundleFile:
    path = folder / name
    return BundleFile(name, path.stat().st_size, sha256_of(path), path)
