"""Checks for untrusted file names: a name must stay inside the folder that it belongs to.

Every name from a manifest, an index or a listing is checked here before anything is read, written or deleted.
"""

import os
import stat
from pathlib import Path, PurePosixPath, PureWindowsPath

from .errors import UserError

MAX_NAME = 1024
HUB_BLOBS = "blobs"


def name_refusal(name: object) -> str | None:
    """Return None if `name` is a relative, normalized, printable path inside a folder; otherwise why it is
    not.
    """
    if not isinstance(name, str) or not name:
        return "it is not a name"
    if len(name) > MAX_NAME:
        return f"it has more than {MAX_NAME} characters"
    if not name.isprintable() or "\\" in name:
        return "it holds a backslash, or a character that cannot be printed"
    path = PurePosixPath(name)
    if path.is_absolute() or PureWindowsPath(name).drive:
        return "it is absolute"
    if ".." in path.parts:
        return "it leads out of the folder"
    if path.as_posix() != name or name == ".":
        return "it is not in its shortest form"
    return None


def require_inside(name: object, where: str) -> str:
    """Return `name`, as found in `where`. UserError is raised unless the name is a plain path inside the
    folder.
    """
    reason = name_refusal(name)
    if reason is not None:
        raise UserError(
            f"{where} names the file {_shown(name)}, which cannot be a file of this folder: {reason}. "
            "No file was touched; use a copy of the folder from someone you trust"
        )
    return str(name)


def leads_out(folder: Path, name: str) -> bool:
    """Say whether `folder/name`, or a folder on the way to it, is a symlink that leads out of `folder`.

    Links into the `blobs` folder of the same repository in the Hub's cache are allowed.
    """
    try:
        root = folder.resolve()
        target = (folder / name).resolve()
    except (OSError, RuntimeError):
        return True
    return not (target.is_relative_to(root) or target.is_relative_to(_hub_blobs(root) or root))


def parent_leads_out(folder: Path, name: str) -> bool:
    """Say whether the directory of `folder/name` is outside `folder`: nothing may be written or deleted
    there.
    """
    parent = PurePosixPath(name).parent.as_posix()
    return parent != "." and not (folder / parent).resolve().is_relative_to(folder.resolve())


def file_refusal(folder: Path, name: str) -> str | None:
    """Return None if `folder/name` is a regular file of that folder; otherwise why it is not."""
    if leads_out(folder, name):
        return "a symlink that leads out of the folder"
    try:
        mode = (folder / name).stat().st_mode
    except OSError as error:
        return error.strerror or str(error)
    return None if stat.S_ISREG(mode) else "not a regular file"


def require_file(folder: Path, name: str) -> Path:
    """Return the path `folder/name`. UserError is raised unless the name is that of a regular file in the
    folder.
    """
    reason = file_refusal(folder, name)
    if reason is not None:
        raise UserError(f"{folder / name} is not used ({reason}); put a regular file in its place")
    return folder / name


def _hub_blobs(snapshot: Path) -> Path | None:
    """Return `…/models--ORG--NAME/blobs` for the folder `…/models--ORG--NAME/snapshots/COMMIT`."""
    repository = snapshot.parent.parent
    blobs = repository / HUB_BLOBS
    is_hub = snapshot.parent.name == "snapshots" and repository.name.startswith("models--")
    return blobs if is_hub and blobs.is_dir() and not os.path.islink(blobs) else None


def _shown(name: object) -> str:
    text = ascii(name)
    return text if len(text) <= 120 else text[:117] + "..."
