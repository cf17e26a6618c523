"""Turns every failure of a request to the Hub into one message that says what to do.

Retrying is left to `huggingface_hub` and `rate_limit.py`, so a failure that arrives here is final.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub import constants, errors

from ....base.errors import UserError


class HubNotAskedError(UserError):
    """The Hub was not asked: no token, no network, or offline mode."""


RESUME = "Nothing is lost: run the same command again to resume"


@contextmanager
def explained(repo_id: str) -> Iterator[None]:
    """Raise the Hub client's errors, also wrapped ones, as UserError; let programming errors through."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None:
            if reason := _no_answer(cause):
                raise HubNotAskedError(reason) from error
            message = _explanation(cause, repo_id)
            if message is not None:
                raise UserError(message) from error
            cause = cause.__cause__ or cause.__context__
        raise


def _no_answer(error: BaseException) -> str | None:
    if isinstance(error, errors.LocalTokenNotFoundError):
        return "there is no Hub access token here; log in with `hf auth login`, or set HF_TOKEN"
    if isinstance(error, errors.OfflineModeIsEnabled):
        return "the Hub client is in offline mode; unset HF_HUB_OFFLINE to push"
    if isinstance(error, errors.HfHubHTTPError):
        return None
    # The HTTP library's own base class, whichever library it is.
    if isinstance(error, (errors.HTTPError, ConnectionError)):
        return (
            f"no connection to {constants.ENDPOINT} ({error}). Check the network (or HF_ENDPOINT). {RESUME}"
        )
    return None


def _explanation(error: BaseException, repo_id: str) -> str | None:
    if isinstance(error, errors.HFValidationError):
        return f"{repo_id!r} is not a Hub repository id; give --to ORG/NAME, or --to folder:DIR"
    if isinstance(error, errors.HfHubHTTPError):
        return _explain_status(error, repo_id)
    return None


def _explain_status(error: errors.HfHubHTTPError, repo_id: str) -> str:
    status = error.response.status_code
    said = error.server_message or error.response.reason_phrase
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"{repo_id} is not on the Hub, or this token may not see it; check the name and the token"
    if status == 401:
        return "the Hub refused the access token (401); renew it with `hf auth login`, or correct HF_TOKEN"
    if status == 403 and "storage" in said.lower():
        return (
            f"the Hub has no room for {repo_id}, which is private until it is complete (403: {said}). Free "
            f"some, or create it publicly (`hf repos create {repo_id}`) and push again"
        )
    if status == 403:
        return (
            f"this access token may not write to {repo_id} (403: {said}); "
            "use a token with write permission for that organization"
        )
    if status in (409, 412):
        return (
            f"{repo_id} changed while this push was running ({status}: {said}). Nothing of this release was "
            "committed; run the same command again to push onto the new commit"
        )
    if status == 429:
        wait = error.response.headers.get("Retry-After")
        when = f"in {wait} s" if wait else "later"
        return f"the Hub's rate limit is reached (429); try again {when}. {RESUME}"
    if status >= 500:
        return f"the Hub is in trouble ({status}: {said}). {RESUME}"
    return f"the Hub refused a request for {repo_id} ({status}: {said})"
