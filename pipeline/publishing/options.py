"""The options of `release` for its push, beside the target. The options are plain data; `push` acts on
them.
"""

from dataclasses import dataclass

from ...base.option_fields import check_options, option


@dataclass(frozen=True)
class PublishOptions:
    """The options of a push; a value that is not allowed raises UserError."""

    private: bool = option(False, "Keep a repository that this release creates private.")
    create_pr: bool = option(False, "Open a pull request instead of committing to main.")
    to_revision: str | None = option(
        None,
        "Push to this branch of the repository, which is created if it does not exist.",
        metavar="BRANCH",
    )
    allow_unjudged_speed: bool = option(
        False,
        "Publish even if speed was emulated and therefore not judged; the model card then begins with "
        '"Speed was not judged".',
    )

    def __post_init__(self) -> None:
        check_options(self)
