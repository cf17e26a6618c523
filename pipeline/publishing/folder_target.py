"""Publishing into a folder so that it always holds either the whole new release or its previous state.

Publishing to the Hub is in `hub/`; `push.py` decides whether the release may be published.
"""

import ctypes
import errno
import glob
import hashlib
import os
import shutil
from pathlib import Path

from ...base.atomic_files import fsync_directory
from ...base.errors import UserError
from ...base.progress import progress_bar
from ...base.untrusted_names import file_refusal
from ..records.artifact import MANIFEST_NAME, REPORT_FOLDER, SIGNATURE_NAME, VERDICT_NAME, Artifact
from ..records.file_digests import sha256_of
from .bundle import CARD_NAME, CHUNK, BundleFile, bundle_digest
from .push_result import Operation, PushResult, file_action


def preview_folder(files: list[BundleFile], directory: Path) -> PushResult:
    """Preview publishing to `directory`. Raises UserError if the folder may not be replaced."""
    before = _release_in(directory)
    operations = []
    for file in files:
        known = before.get(file.path)
        action = file_action(known is not None, known == (file.size, file.sha256))
        operations.append(Operation(action, file.path, file.size, file.sha256))
    for name in sorted(before.keys() - {file.path for file in files}):
        operations.append(Operation("delete", name, before[name][0]))
    same = all(operation.action == "keep" for operation in operations)
    return PushResult(
        target=f"folder:{directory}",
        status="unchanged" if same else "planned",
        url=str(directory),
        operations=operations,
    )


def publish_to_folder(files: list[BundleFile], directory: Path, progress: bool = True) -> PushResult:
    """Copy the release beside `directory`, check every byte of the copy, then rename it into place."""
    result = preview_folder(files, directory)
    if result.status == "unchanged":
        _remove_leftovers(directory)
        return result
    staging = directory.with_name(f".{directory.name}.{bundle_digest(files)[:12]}.partial")
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        _refuse_a_full_disk(files, staging)
        _copy(files, staging, progress)
        _swap_in(staging, directory)
        _remove_leftovers(directory)
    except OSError as error:
        raise UserError(
            f"cannot publish to {directory}: {error.strerror or error}. The folder has not changed; "
            "run the same command again to resume"
        ) from error
    result.status = "pushed"
    return result


def _release_in(directory: Path) -> dict[str, tuple[int, str]]:
    """Return the size and sha256 of every file now in `directory`, which must be absent, empty or a release
    of ours.
    """
    if not directory.exists():
        return {}
    if not directory.is_dir():
        raise UserError(f"{directory} is not a folder; give a folder that is absent, empty or a release")
    names = {path.relative_to(directory).as_posix() for path in directory.rglob("*") if not path.is_dir()}
    if not names:
        return {}
    if MANIFEST_NAME not in names:
        raise UserError(
            f"{directory} holds other files ({min(names)}, …) and no {MANIFEST_NAME}, so it is not a release "
            "of ours and is left alone; give another folder"
        )
    ours = {*Artifact.read(directory).files, MANIFEST_NAME, VERDICT_NAME, SIGNATURE_NAME, CARD_NAME}
    foreign = sorted(n for n in names if n not in ours and not n.startswith(f"{REPORT_FOLDER}/"))
    if foreign:
        raise UserError(
            f"{directory} is a release with files added to it ({', '.join(foreign[:3])}); replacing it would "
            "delete them. Move the added files away, or give another folder"
        )
    strange = sorted(name for name in names if file_refusal(directory, name) is not None)
    if strange:
        raise UserError(
            f"{directory} holds {strange[0]!a}, {file_refusal(directory, strange[0])}, so it is not a "
            "release of ours and is left alone; give another folder"
        )
    return {name: ((directory / name).stat().st_size, sha256_of(directory / name)) for name in names}


def _refuse_a_full_disk(files: list[BundleFile], staging: Path) -> None:
    present = sum(path.stat().st_size for path in staging.rglob("*") if path.is_file())
    needed = sum(file.size for file in files) - present
    free = shutil.disk_usage(staging.parent).free
    if needed > free:
        raise OSError(errno.ENOSPC, f"{needed:,} bytes are needed and {free:,} are free")


def _copy(files: list[BundleFile], staging: Path, progress: bool) -> None:
    """Fill `staging` with exactly `files`; whole files of an interrupted run are kept."""
    wanted = {file.path for file in files}
    if any(path.is_symlink() for path in [staging, *staging.rglob("*")]):
        raise UserError(f"{staging} holds a symlink, which no push of ours makes; remove it and push again")
    for path in staging.rglob("*"):
        if path.is_file() and path.relative_to(staging).as_posix() not in wanted:
            path.unlink()
    total = sum(file.size for file in files)
    bar = progress_bar(total=total, unit="B", unit_scale=True, desc="publish", shown=progress)
    with bar:
        for file in files:
            copy = staging / file.path
            if not (copy.is_file() and copy.stat().st_size == file.size and sha256_of(copy) == file.sha256):
                _copy_one(file, copy)
            bar.update(file.size)
    for folder in {(staging / file.path).parent for file in files} | {staging}:
        fsync_directory(folder)


def _copy_one(file: BundleFile, copy: Path) -> None:
    copy.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with file.open() as source, open(copy, "wb") as target:
        while chunk := source.read(CHUNK):
            digest.update(chunk)
            target.write(chunk)
        target.flush()
        os.fsync(target.fileno())
    if digest.hexdigest() != file.sha256 or sha256_of(copy) != file.sha256:
        raise UserError(f"{file.path} changed while it was being published; validate the artifact again")


def _swap_in(staging: Path, directory: Path) -> None:
    if directory.is_dir() and any(directory.iterdir()):
        _exchange(staging, directory)
    else:
        os.rename(staging, directory)
    fsync_directory(directory.parent)


def _remove_leftovers(directory: Path) -> None:
    """Remove the replaced release, and leftovers of interrupted pushes of other releases."""
    for path in directory.parent.glob(f".{glob.escape(directory.name)}.*.partial*"):
        shutil.rmtree(path)


RENAME_EXCHANGE = 2
AT_FDCWD = -100


def _exchange(left: Path, right: Path) -> None:
    """Exchange the names of two folders at once; if the system cannot, `right` is absent for a moment."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is not None:
        names = os.fsencode(left), os.fsencode(right)
        if renameat2(AT_FDCWD, names[0], AT_FDCWD, names[1], RENAME_EXCHANGE) == 0:
            return
    aside = left.with_name(left.name + ".old")
    os.rename(right, aside)
    os.rename(left, right)
    os.rename(aside, left)
