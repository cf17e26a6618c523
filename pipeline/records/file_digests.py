"""sha256 of files, several at once: one thread hashes 1 GB a second, and a fast disk or memory gives more.

`artifact.py` has the records about files.
"""

import hashlib
import threading
from collections.abc import Generator, Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import islice
from pathlib import Path

from ..machine.cores import available_cores

FILES_AT_ONCE = 8
CHUNK_BYTES = 1 << 20


def sha256_of(path: Path) -> str:
    return _sha256(path, threading.Event())


def sha256_of_each(paths: Iterable[Path]) -> Generator[tuple[Path, str], None, None]:
    """Yield each file and its sha256, in the order in which they finish.

    The next path is requested when a file has finished, so that processes can share one list. If the caller
    stops, or a file cannot be read (OSError), unfinished work ends within a chunk of its file.
    """
    at_once, left = min(FILES_AT_ONCE, available_cores()), iter(paths)
    stopped = threading.Event()
    with ThreadPoolExecutor(at_once) as threads:
        running: dict[Future[str], Path] = {}

        def begin(count: int) -> None:
            for path in islice(left, count):
                running[threads.submit(_sha256, path, stopped)] = path

        try:
            begin(at_once)
            while running:
                for done in wait(running, return_when=FIRST_COMPLETED).done:
                    yield running.pop(done), done.result()
                    begin(1)
        finally:
            stopped.set()


def sha256_of_all(paths: Iterable[Path]) -> dict[Path, str]:
    return dict(sha256_of_each(paths))


def digest_of(sha256s: Mapping[str, str]) -> str:
    """Return one sha256 over names and sha256s."""
    digest = hashlib.sha256()
    for name in sorted(sha256s):
        digest.update(f"{name}\0{sha256s[name]}\n".encode())
    return digest.hexdigest()


def _sha256(path: Path, stopped: threading.Event) -> str:
    """Return the digest of the bytes read before the work was stopped; nobody uses a stopped digest."""
    digest, chunk = hashlib.sha256(), memoryview(bytearray(CHUNK_BYTES))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(chunk):
            digest.update(chunk[:count])
            if stopped.is_set():
                break
    return digest.hexdigest()
