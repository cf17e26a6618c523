"""The one fact about an interrupted push that the Hub does not keep: that we created the repository.

A repository that this push created becomes public when it is complete; one that was private before stays
private.
"""

from pathlib import Path

from huggingface_hub import constants

from ....base.atomic_files import write_json
from ....base.errors import UserError
from ....base.untrusted_files import read_json_object

RECORD_NAME = ".scalegate-push.json"


def is_pending(folder: Path, repo_id: str) -> bool:
    """Say whether an earlier push of the artifact in `folder` set out to create `repo_id` and did not
    finish.
    """
    return _key(repo_id) in _read(folder)


def set_pending(folder: Path, repo_id: str, pending: bool) -> None:
    before = _read(folder)
    after = before | {_key(repo_id)} if pending else before - {_key(repo_id)}
    if after == before:
        return
    if after:
        write_json(folder / RECORD_NAME, {"created_by_an_unfinished_push": sorted(after)})
    else:
        (folder / RECORD_NAME).unlink()


def _key(repo_id: str) -> str:
    return f"{constants.ENDPOINT}/{repo_id}"


def _read(folder: Path) -> set[str]:
    try:
        return set(read_json_object(folder / RECORD_NAME)["created_by_an_unfinished_push"])
    except (UserError, KeyError, TypeError):
        return set()
