"""Publishing a release to a Hub repository: uploads first, then one commit, read back, made public last.

Nothing of the release is visible before the commit, and nothing new is public before the read-back. Every
action first looks at the Hub's present state, so an interrupted push continues when it is run again.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    ModelCard,
    errors,
    get_token,
)
from huggingface_hub.utils import (
    are_progress_bars_disabled,
    disable_progress_bars,
    enable_progress_bars,
    validate_repo_id,
)
from tqdm import tqdm

from ....base.errors import UserError
from ....base.log import is_quiet
from ....base.progress import progress_bar
from ...checkpoints.hub_access import require_hub_access
from ..bundle import CARD_NAME, BundleFile, bundle_digest
from ..push_result import Operation, PushResult, file_action
from .failures import HubNotAskedError, explained
from .pending import is_pending, set_pending
from .rate_limit import waiting_out_limits
from .read_back import require_same
from .repository import Repository, read_repository, stale_files


@dataclass(frozen=True)
class HubTarget:
    """A release's place on the Hub."""

    repo_id: str
    private: bool = False
    create_pr: bool = False
    revision: str | None = None


def check_hub(target: HubTarget, artifact_folder: Path) -> None:
    """Raise UserError if publishing any release to `target` would fail. Sends nothing that writes."""
    with explained(target.repo_id):
        _Push([], target, artifact_folder, progress=False)


def check_front_matter(repo_id: str, card: str) -> None:
    """Raise UserError if the Hub would refuse `card`; the Hub is asked before there is anything to
    publish.
    """
    with explained(repo_id):
        require_hub_access()
        refuse_card(card)


def preview_hub(files: list[BundleFile], target: HubTarget, artifact_folder: Path) -> PushResult:
    """Preview publishing, from the Hub's present state; if the Hub cannot be asked, for an empty target.

    Nothing is written, and neither a token nor a network is needed.
    """
    try:
        with explained(target.repo_id):
            return _Push(files, target, artifact_folder, progress=False).preview()
    except HubNotAskedError as reason:
        with explained(target.repo_id):
            validate_repo_id(target.repo_id)
        unseen = Repository(target.repo_id, exists=target.create_pr)
        result = _Push(files, target, artifact_folder, progress=False, seen=unseen).preview()
        result.notes.append(f"what the target holds was not looked at: {reason.message}")
        return result


def publish_to_hub(
    files: list[BundleFile], target: HubTarget, artifact_folder: Path, title: str, progress: bool = True
) -> PushResult:
    with explained(target.repo_id):
        return _Push(files, target, artifact_folder, progress).run(title)


class _Push:
    """One push of one release; its state is the Hub's state when the push began."""

    def __init__(
        self,
        files: list[BundleFile],
        target: HubTarget,
        artifact_folder: Path,
        progress: bool,
        seen: Repository | None = None,
    ):
        """seen: the state that the target is assumed to have, so that the Hub is not asked"""
        self.files, self.target, self.artifact_folder, self.progress = (
            files,
            target,
            artifact_folder,
            progress,
        )
        self.api = HfApi(token=_token() if seen is None else False, library_name="scalegate")
        self.repository = seen or read_repository(self.api, target.repo_id, target.revision)
        self.ours_to_publish = not self.repository.exists or is_pending(artifact_folder, target.repo_id)
        self._refuse_contradictions()
        self.stale = stale_files(self.api, self.repository, files)
        if seen is None and not self.is_unchanged:
            for card in (file for file in files if file.path == CARD_NAME):
                refuse_card(card.read(0, card.size).decode("utf-8"))

    def _refuse_contradictions(self) -> None:
        name = self.target.repo_id
        if self.target.create_pr and self.target.revision is not None:
            raise UserError("--create-pr opens a pull request against main; leave --revision out")
        if self.target.create_pr and not self.repository.exists:
            raise UserError(f"{name} does not exist, so there is nothing to open a pull request against")
        if self.target.private and self.repository.private is False:
            raise UserError(
                f"{name} is public and a push does not hide it; make it private first, or drop --private"
            )

    @property
    def is_unchanged(self) -> bool:
        return self.repository.holds(self.files) and not self.stale

    @property
    def goes_public(self) -> bool:
        return self.ours_to_publish and not self.target.private and not self.target.create_pr

    def preview(self) -> PushResult:
        target, repository = self.target, self.repository
        operations = []
        if not repository.exists:
            operations.append(Operation("create", f"private repository {target.repo_id}"))
        if target.revision is not None and repository.head is None:
            operations.append(Operation("create", f"branch {target.revision}"))
        for file in self.files:
            remote = repository.files.get(file.path)
            action = file_action(remote is not None, remote is not None and remote.is_same_as(file))
            operations.append(Operation(action, file.path, file.size, file.sha256))
        operations += [Operation("delete", name, repository.files[name].size) for name in self.stale]
        if not self.is_unchanged:
            where = f"onto {repository.head or 'the first commit'}"
            if target.create_pr:
                operations.append(Operation("open", f"pull request, one commit {where}"))
            else:
                operations.append(Operation("commit", f"to {target.revision or 'main'}, one commit {where}"))
        operations.append(Operation("verify", "every file's size and digest, and stored bytes, read back"))
        if self.goes_public:
            operations.append(Operation("publish", f"{target.repo_id} becomes public"))
        return PushResult(
            target=target.repo_id,
            status="unchanged" if self.is_unchanged and not self.goes_public else "planned",
            url=self._url(),
            operations=operations,
            commit=repository.head if self.is_unchanged else None,
            private=None if not repository.exists else repository.private,
        )

    def run(self, title: str) -> PushResult:
        result = self.preview()
        already_there = self.is_unchanged
        result.status = "unchanged" if already_there and not self.goes_public else "pushed"
        title = f"{title} ({bundle_digest(self.files)[:12]})"
        if already_there:
            commit = str(self.repository.head)
        else:
            self._prepare()
            open_request = self._find_pull_request(title) if self.target.create_pr else None
            if open_request is not None:
                result.url, commit, result.status = *open_request, "unchanged"
                result.notes.append("this pull request is already open")
            else:
                result.url, commit = self._commit(title)
        require_same(self.api, self.target.repo_id, commit, self.files, self.progress)
        if self.goes_public:
            waiting_out_limits(lambda: self.api.update_repo_settings(self.target.repo_id, private=False))
        set_pending(self.artifact_folder, self.target.repo_id, False)
        result.commit = commit
        result.private = not self.goes_public and self.repository.private is not False
        if result.private and not self.target.private:
            result.notes.append(
                f"{self.target.repo_id} was private before and stays so; make it public yourself"
            )
        return result

    def _prepare(self) -> None:
        """Create the repository and the branch, private and empty, unless they exist."""
        name, revision = self.target.repo_id, self.target.revision
        if not self.repository.exists:
            set_pending(self.artifact_folder, name, True)
            try:
                waiting_out_limits(lambda: self.api.create_repo(name, private=True))
            except errors.HfHubHTTPError:
                set_pending(self.artifact_folder, name, False)
                raise
        if revision is not None and self.repository.head is None:
            # From the first commit, so that the branch holds this release and not what main holds.
            first = self.api.list_repo_commits(name)[-1].commit_id
            waiting_out_limits(
                lambda: self.api.create_branch(name, branch=revision, revision=first, exist_ok=True)
            )
        if self.repository.head is None:
            self.repository = read_repository(self.api, name, revision)
            self.stale = stale_files(self.api, self.repository, self.files)

    def _find_pull_request(self, title: str) -> tuple[str, str] | None:
        """Return the URL and commit of an open pull request of ours that holds exactly this release."""
        name = self.target.repo_id
        for discussion in self.api.get_repo_discussions(
            name, discussion_type="pull_request", discussion_status="open"
        ):
            if discussion.title == title:
                reference = f"refs/pr/{discussion.num}"
                proposed = read_repository(self.api, name, reference)
                if proposed.head is not None and proposed.holds(self.files):
                    return discussion.url, proposed.head
        return None

    def _commit(self, title: str) -> tuple[str, str]:
        name, create_pr, revision = self.target.repo_id, self.target.create_pr, self.target.revision
        additions = [
            CommitOperationAdd(f.path, f.source if isinstance(f.source, bytes) else str(f.source))
            for f in self.files
            if not (f.path in self.repository.files and self.repository.files[f.path].is_same_as(f))
        ]
        total = sum(addition.upload_info.size for addition in additions)
        with _client_progress_bars(self.progress), self._bar(total) as bar:
            # One file after another: what was uploaded before an interruption is whole, and the Hub keeps it.
            for addition in additions:
                self.api.preupload_lfs_files(
                    name, [addition], revision=revision, create_pr=create_pr, free_memory=False
                )
                bar.update(addition.upload_info.size)
        info = waiting_out_limits(
            lambda: self.api.create_commit(
                name,
                [*additions, *(CommitOperationDelete(path, is_folder=False) for path in self.stale)],
                commit_message=title,
                revision=revision,
                create_pr=create_pr,
                parent_commit=self.repository.head,
            )
        )
        return str(info.pr_url) if create_pr else self._url(), info.oid

    def _bar(self, total: int) -> tqdm:
        return progress_bar(total=total, unit="B", unit_scale=True, desc="upload", shown=self.progress)

    def _url(self) -> str:
        branch = f"/tree/{self.target.revision}" if self.target.revision else ""
        return f"{self.api.endpoint}/{self.target.repo_id}{branch}"


def refuse_card(card: str) -> None:
    """Raise UserError if the Hub would refuse the card; the Hub is asked before anything is created or
    sent.
    """
    try:
        ModelCard(card, ignore_metadata_errors=True).validate()
    except ValueError as error:
        raise UserError(
            f"the Hub refuses the front matter of {CARD_NAME}: {_reasons(str(error))}. The front "
            "matter comes from the base's card: correct or remove the field in that card, and quantize again"
        ) from error


def _reasons(answer: str) -> str:
    """Return the messages in the Hub's answer, or the whole answer if it is not JSON of that form."""
    try:
        return "; ".join(str(problem["message"]) for problem in json.loads(answer)["errors"])
    except (ValueError, KeyError, TypeError):
        return answer.strip()[:500]


def _token() -> str:
    require_hub_access()
    token = get_token()
    if token is None:
        raise errors.LocalTokenNotFoundError("no token")
    return token


@contextmanager
def _client_progress_bars(progress: bool) -> Iterator[None]:
    """Show the Hub client's own progress bars, one per file, only if ours are shown too."""
    hide = not (progress and not is_quiet() and sys.stderr.isatty()) and not are_progress_bars_disabled()
    if hide:
        disable_progress_bars()
    try:
        yield
    finally:
        if hide:
            enable_progress_bars()
