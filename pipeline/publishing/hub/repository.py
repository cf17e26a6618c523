"""The present state of a Hub repository: visibility, head commit and files. Reads only.

Changing anything is left to `publish.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from huggingface_hub import HfApi, errors, hf_hub_url
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

from ....base.errors import UserError
from ....base.untrusted_files import MAX_BYTES, parse_json
from ....base.untrusted_names import name_refusal
from ...records.artifact import MANIFEST_NAME, REPORT_FOLDER, SIGNATURE_NAME, VERDICT_NAME
from ..bundle import CARD_NAME, BundleFile

WEIGHT_SUFFIXES = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".gguf",
    ".safetensors.index.json",
    ".bin.index.json",
)


@dataclass(frozen=True)
class RemoteFile:
    """A file as the Hub lists it; the sha256 is known for large files only, the git sha1 for all."""

    size: int
    git_oid: str
    sha256: str | None

    def is_same_as(self, file: BundleFile) -> bool:
        if self.size != file.size:
            return False
        return self.sha256 == file.sha256 if self.sha256 else self.git_oid == file.git_oid()


@dataclass(frozen=True)
class Repository:
    """head: the commit at the revision asked for; None if the repository or the branch does not exist."""

    repo_id: str
    exists: bool
    private: bool | None = None
    head: str | None = None
    files: Mapping[str, RemoteFile] = field(default_factory=dict)

    def holds(self, files: list[BundleFile]) -> bool:
        return all(f.path in self.files and self.files[f.path].is_same_as(f) for f in files)


def read_repository(api: HfApi, repo_id: str, revision: str | None) -> Repository:
    try:
        info = api.model_info(repo_id)
    except errors.RepositoryNotFoundError:
        return Repository(repo_id, exists=False)
    private = bool(info.private)
    if revision is not None:
        try:
            info = api.model_info(repo_id, revision=revision)
        except errors.RevisionNotFoundError:
            return Repository(repo_id, exists=True, private=private)
    head = str(info.sha)
    return Repository(repo_id, True, private, head, list_files(api, repo_id, head))


def list_files(api: HfApi, repo_id: str, revision: str) -> dict[str, RemoteFile]:
    files = {}
    for entry in api.list_repo_tree(repo_id, recursive=True, revision=revision):
        if isinstance(entry, RepoFile):
            files[entry.path] = RemoteFile(
                size=entry.size, git_oid=entry.blob_id, sha256=entry.lfs.sha256 if entry.lfs else None
            )
    return files


def read_bytes(api: HfApi, repo_id: str, revision: str, path: str, start: int, length: int) -> bytes:
    """Return `length` bytes of a stored file from `start`, as anybody who downloads it would get them."""
    url = hf_hub_url(repo_id, path, revision=revision, endpoint=api.endpoint)
    headers = {**build_hf_headers(token=api.token), "Range": f"bytes={start}-{start + length - 1}"}
    response = get_session().get(url, headers=headers)
    hf_raise_for_status(response)
    content = response.content
    return content if response.status_code == 206 else content[start : start + length]


def stale_files(api: HfApi, repository: Repository, files: list[BundleFile]) -> list[str]:
    """Return files of an earlier release of ours that this release no longer has.

    Raises UserError if the repository holds weights that are not ours: replacing them would delete somebody's
    model, and leaving them would let a server load both.
    """
    sent = {file.path: file for file in files}
    ours: set[str] = set()
    if MANIFEST_NAME in repository.files and repository.head is not None:
        size = min(repository.files[MANIFEST_NAME].size, MAX_BYTES)
        content = read_bytes(api, repository.repo_id, repository.head, MANIFEST_NAME, 0, size)
        ours = _named_in(content) | {
            name for name in repository.files if name.startswith(f"{REPORT_FOLDER}/")
        }
    foreign = [
        name
        for name, remote in sorted(repository.files.items())
        if name.endswith(WEIGHT_SUFFIXES)
        and name not in ours
        and not (name in sent and remote.is_same_as(sent[name]))
    ]
    if foreign:
        raise UserError(
            f"{repository.repo_id} already holds weights that are not a release of ours "
            f"({', '.join(foreign[:3])}); push to another repository, or to a new branch with --revision"
        )
    return sorted(ours & repository.files.keys() - sent.keys())


def _named_in(manifest: bytes) -> set[str]:
    """Return the files that an earlier release's manifest names; empty if the manifest is not one of ours."""
    try:
        files = parse_json(manifest, MANIFEST_NAME)["files"]
    except (UserError, KeyError, TypeError):
        return set()
    if not isinstance(files, dict) or any(name_refusal(name) is not None for name in files):
        return set()
    return {*files, MANIFEST_NAME, VERDICT_NAME, SIGNATURE_NAME, CARD_NAME}
