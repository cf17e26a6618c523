"""The result of a push, or of its preview: plain data for the terminal, for `--json` and for `release`."""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Action = Literal["create", "add", "replace", "keep", "delete", "commit", "open", "verify", "publish"]
Status = Literal["planned", "pushed", "unchanged"]


def file_action(is_there: bool, is_same: bool) -> Action:
    """Return the action for a file of the release, by whether the target has a file of that name."""
    if not is_there:
        return "add"
    return "keep" if is_same else "replace"


@dataclass(frozen=True)
class Operation:
    """One action on the target, in order; size and sha256 if it concerns a file of the release."""

    action: Action
    subject: str
    size: int | None = None
    sha256: str | None = None


@dataclass
class PushResult:
    """The result of a push. planned: a dry run; pushed: the target changed; unchanged: the target had exactly
    this release already."""

    target: str
    status: Status
    url: str
    operations: list[Operation] = field(default_factory=list)
    commit: str | None = None
    """The Hub commit that holds the release."""
    private: bool | None = None
    """The repository's visibility afterwards; None for a folder."""
    notes: list[str] = field(default_factory=list)
    """Further notes for the user, such as why a repository stayed private."""
    gate: str | None = None
    """The gate's verdict on these bytes, in a few words; in a dry run only, as is the card."""
    card: str | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
