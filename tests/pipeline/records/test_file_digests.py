"""Files hashed several at once: each as `hashlib` does, paths taken as files end, an unreadable one told."""

import hashlib
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from scalegate.pipeline.records import file_digests
from scalegate.pipeline.records.file_digests import CHUNK_BYTES, sha256_of, sha256_of_all, sha256_of_each


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    sizes = [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, 3 * CHUNK_BYTES + 7, *range(20)]
    files = [tmp_path / f"file-{index}" for index in range(len(sizes))]
    for path, size in zip(files, sizes, strict=True):
        path.write_bytes(os.urandom(size))
    return files


def test_every_file_has_the_digest_that_hashlib_gives(paths: list[Path]) -> None:
    expected = {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}
    assert sha256_of_all(paths) == expected
    assert {path: sha256_of(path) for path in paths} == expected


def test_no_more_paths_are_taken_than_are_read_at_once(
    paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_digests, "available_cores", lambda: 3)
    taken: list[Path] = []

    def dealt() -> Iterator[Path]:
        for path in paths:
            taken.append(path)
            yield path

    for ended, _ in enumerate(sha256_of_each(dealt()), 1):
        assert len(taken) <= ended + 2


def test_a_file_that_is_not_there_is_told(paths: list[Path]) -> None:
    missing = paths[0].with_name("missing")
    with pytest.raises(FileNotFoundError, match="missing"):
        sha256_of_all([*paths, missing])


def test_nothing_is_read_on_where_the_caller_stops(tmp_path: Path) -> None:
    endless = tmp_path / "endless"
    os.mkfifo(endless)
    writer = os.open(endless, os.O_RDWR)
    small = tmp_path / "small"
    small.write_bytes(b"x")
    os.set_blocking(writer, False)
    stopped = threading.Event()

    def feed() -> None:
        while not stopped.wait(0.001):
            with suppress(BlockingIOError):
                os.write(writer, bytes(4096))

    with ThreadPoolExecutor(1) as threads:
        threads.submit(feed)
        digests = sha256_of_each([small, endless])
        assert next(digests)[0] == small
        digests.close()
        stopped.set()
    os.close(writer)
