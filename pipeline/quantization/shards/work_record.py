"""The record of a quantize job in its output folder: its parameters, and its finished work.

The record makes an interrupted job resumable and protects the folders of other jobs. Each finished shard has
its own file in the record, so that several processes can work, and records stay small compared with the
checkpoint. `scalegate.json` replaces the whole record.
"""

import contextlib
import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from pydantic import FiniteFloat, TypeAdapter

from ....base.atomic_files import PARTIAL_SUFFIX, write_json
from ....base.errors import UserError
from ....base.untrusted_files import read_json_object
from ....base.untrusted_names import parent_leads_out
from ...records.artifact import (
    MANIFEST_NAME,
    REPORT_FOLDER,
    SIGNATURE_NAME,
    SOURCE_NAME,
    VERDICT_NAME,
    Artifact,
    FileRecord,
)
from ...records.file_digests import sha256_of

RECORD_NAME = ".scalegate-quantize.json"
LOCK_NAME = ".scalegate-quantize.lock"
STALE_S = 0.2
"""Seconds for a second try: if the lock is a plain file, the first try finds that its process has ended."""
CALIBRATION_FOLDER = ".scalegate-calibration"
PARTS_FOLDER = ".scalegate-parts"
FINISHED_SUFFIX, MEASURED_SUFFIX = ".finished.json", ".measured.json"
START_OVER = "add --overwrite to start over, or give another folder"


@dataclass(frozen=True)
class FinishedShard:
    """A shard that is complete on disk except for its final name, and the measurements made with it."""

    file: FileRecord
    modules: dict[str, dict[str, Any]]


_SHARD: TypeAdapter[FinishedShard] = TypeAdapter(FinishedShard)
_PAIRS: TypeAdapter[dict[str, tuple[FiniteFloat, FiniteFloat]]] = TypeAdapter(
    dict[str, tuple[FiniteFloat, FiniteFloat]]
)
_MEASURED: TypeAdapter[dict[str, FiniteFloat]] = TypeAdapter(dict[str, FiniteFloat])


@dataclass
class WorkRecord:
    """The content of the record; `parameters` is everything that decides the artifact's bytes."""

    folder: Path
    parameters: dict[str, Any]
    shards: dict[str, FinishedShard] = field(default_factory=dict)
    measured: dict[str, float] = field(default_factory=dict)
    """For each module, the measurement that decides its shared tensors (`shared_tensors.py`)."""
    kv: dict[str, tuple[float, float]] = field(default_factory=dict)
    """For each attention module, the largest magnitude of its keys and of its values on a text
    (`kv_scales.py`)."""

    @property
    def calibration(self) -> Path:
        """Return the folder for results of a calibration text, one file per decoder layer
        (`calibration.py`).
        """
        return self.folder / CALIBRATION_FOLDER

    @property
    def parts(self) -> Path:
        return self.folder / PARTS_FOLDER

    def finish(self, name: str, shard: FinishedShard) -> None:
        self.shards[name] = shard
        write_json(self.parts / f"{name}{FINISHED_SUFFIX}", asdict(shard))

    def keep_measured(self, name: str, measured: dict[str, float]) -> None:
        """Keep the measurements of the weights in the shard `name`."""
        self.measured |= measured
        write_json(self.parts / f"{name}{MEASURED_SUFFIX}", measured)

    def write(self) -> None:
        write_json(self.folder / RECORD_NAME, {"parameters": self.parameters, "kv": self.kv})

    def reload(self) -> "WorkRecord":
        """Return the record, updated with the other processes' finished work. Raise UserError if a part of
        the record cannot be read.
        """
        path = self.folder / RECORD_NAME
        try:
            self.kv = _PAIRS.validate_python(read_json_object(path)["kv"])
            for path in sorted(self.parts.glob(f"*{FINISHED_SUFFIX}")):
                shard = _SHARD.validate_python(read_json_object(path))
                self.shards[path.name.removesuffix(FINISHED_SUFFIX)] = shard
            for path in sorted(self.parts.glob(f"*{MEASURED_SUFFIX}")):
                self.measured |= _MEASURED.validate_python(read_json_object(path))
        except (UserError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path} is not readable as a work record; {START_OVER}") from error
        return self

    def remove(self) -> None:
        (self.folder / RECORD_NAME).unlink(missing_ok=True)
        for folder in (self.calibration, self.parts):
            shutil.rmtree(folder, ignore_errors=True)

    def drop_damaged(self) -> list[str]:
        """Forget shards that no longer match their record, and return their names."""
        damaged = [
            name for name, shard in self.shards.items() if not _is_whole(self.folder / name, shard.file)
        ]
        for name in damaged:
            del self.shards[name]
            (self.parts / f"{name}{FINISHED_SUFFIX}").unlink()
        return damaged


def _is_whole(path: Path, record: FileRecord) -> bool:
    return path.is_file() and path.stat().st_size == record.size and sha256_of(path) == record.sha256


def parameters_digest(parameters: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(parameters, sort_keys=True).encode()).hexdigest()


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Lock `folder` for one job; the lock of a killed process ends with it."""
    lock = FileLock(folder / LOCK_NAME, timeout=STALE_S)
    try:
        lock.acquire()
    except Timeout:
        raise UserError(f"another quantize is at work in {folder}; wait for it, or stop it") from None
    try:
        yield
    finally:
        # While it is held, so that no other job can have it; where that cannot be, it stays behind.
        with contextlib.suppress(OSError):
            (folder / LOCK_NAME).unlink()
        lock.release()


def finished_artifact(folder: Path, parameters: dict[str, Any]) -> Artifact | None:
    """Return the artifact in `folder`, if these parameters made it and its bytes still match; None without
    one.
    """
    if not (folder / MANIFEST_NAME).is_file():
        return None
    artifact = Artifact.read(folder)
    if artifact.quantization.get("parameters_sha256") != parameters_digest(parameters):
        recorded = {"recipe": artifact.recipe, "versions": artifact.versions}
        _refuse_other_job(folder, recorded, {name: parameters[name] for name in recorded})
    changed = artifact.changed_files(folder)
    if changed:
        raise UserError(f"the artifact in {folder} is damaged ({changed[0]}); {START_OVER}")
    return artifact


def begun_in(folder: Path) -> bool:
    """Say whether there is a finished artifact in `folder`, or one whose shards are being written."""
    return (folder / RECORD_NAME).is_file() or (folder / MANIFEST_NAME).is_file()


def refuse_foreign(folder: Path) -> None:
    """Raise UserError if a locked folder has files of other origin."""
    for name in (PARTS_FOLDER, CALIBRATION_FOLDER):
        if (folder / name).is_symlink():
            raise UserError(f"{folder / name} is a symlink; {START_OVER}")
    if begun_in(folder):
        return
    foreign = [
        name
        for name in _entries(folder)
        if not name.endswith(PARTIAL_SUFFIX) and name not in (CALIBRATION_FOLDER, PARTS_FOLDER)
    ]
    if foreign:
        raise UserError(
            f"{folder} is not empty (it has {foreign[0]}) and `pipeline quantize` did not begin it; "
            "give a new or empty folder"
        )


def open_record(folder: Path, parameters: dict[str, Any]) -> WorkRecord:
    """Return the record of the job interrupted in `folder`, or a new one. Raise UserError if the record
    belongs to another job.
    """
    path = folder / RECORD_NAME
    if not path.is_file():
        record = WorkRecord(folder, parameters)
        # Of a job whose record was cleared away: not this one's.
        shutil.rmtree(record.parts, ignore_errors=True)
        record.write()
        return record
    record = WorkRecord(folder, parameters).reload()
    recorded = read_json_object(path).get("parameters")
    if not isinstance(recorded, dict):
        raise UserError(f"{path} is not readable as a work record; {START_OVER}")
    if recorded != parameters:
        _refuse_other_job(folder, recorded, parameters)
    return record


def _refuse_other_job(folder: Path, recorded: dict[str, Any], parameters: dict[str, Any]) -> None:
    differing = [name for name in parameters if recorded.get(name) != parameters[name]]
    what = " and ".join(differing) or "source or export"
    raise UserError(f"{folder} was made with another {what}; {START_OVER}")


def _entries(folder: Path) -> list[str]:
    """Return the entries of a locked folder, without the lock."""
    return sorted(entry.name for entry in folder.iterdir() if entry.name != LOCK_NAME)


def clear_folder(folder: Path, copied: Iterable[str]) -> None:
    """Remove a job's files from `folder`, `copied` names included. Raise UserError if the folder does not
    belong to a job.
    """
    if not begun_in(folder) and _entries(folder):
        raise UserError(f"{folder} holds files that `pipeline quantize` did not write; give another folder")
    names: set[str] = {
        RECORD_NAME,
        SOURCE_NAME,
        MANIFEST_NAME,
        VERDICT_NAME,
        SIGNATURE_NAME,
        "README.md",
        *copied,
    }
    if (folder / MANIFEST_NAME).is_file():
        names |= set(Artifact.read(folder).files)
    names |= {path.name for path in folder.glob("model*.safetensors*")}
    names |= {path.relative_to(folder).as_posix() for path in folder.rglob(f"*{PARTIAL_SUFFIX}")}
    for name in names:
        if parent_leads_out(folder, name):
            raise UserError(
                f"{folder / name} leads out of the folder through a symlink; nothing was deleted. "
                "Give another folder"
            )
    # The manifest first: without it, nothing here passes for finished.
    for name in sorted(names, key=lambda name: name != MANIFEST_NAME):
        (folder / name).unlink(missing_ok=True)
    for name in (REPORT_FOLDER, CALIBRATION_FOLDER, PARTS_FOLDER):
        shutil.rmtree(folder / name, ignore_errors=True)
