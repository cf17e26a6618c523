"""Waiting out the Hub's rate limit (429) for calls for which its client does not wait: commits and other
calls that write.

`huggingface_hub` waits by itself during uploads, but not in calls that create, commit or change settings.
"""

import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TypeVar

from huggingface_hub import errors
from huggingface_hub.utils import parse_ratelimit_headers

from ....base.log import logger

Result = TypeVar("Result")

TOO_MANY_REQUESTS = 429
MAX_TRIES = 5
MAX_WAIT_SECONDS = 330
"""The Hub counts requests in windows of five minutes; a longer wait is left to the user."""
USUAL_WAIT_SECONDS = 2
"""Seconds before the second try if the answer gives no time; doubled at each further try."""


def waiting_out_limits(call: Callable[[], Result]) -> Result:
    """Return the result of `call`, repeated after each 429 at the time its headers give, at most `MAX_TRIES`
    times.

    A request that was answered with 429 had no effect. The last answer is raised as it came; an answer that
    asks for more than `MAX_WAIT_SECONDS` is raised too.
    """
    for tried in range(1, MAX_TRIES):
        try:
            return call()
        except errors.HfHubHTTPError as error:
            if error.response is None or error.response.status_code != TOO_MANY_REQUESTS:
                raise
            wait = seconds_to_wait(error.response.headers)
            wait = USUAL_WAIT_SECONDS * 2 ** (tried - 1) if wait is None else wait
            if wait > MAX_WAIT_SECONDS:
                raise
        logger.info(f"the Hub's rate limit is reached; trying again in {wait:g} s")
        time.sleep(wait)
    return call()


def seconds_to_wait(headers: Mapping[str, str]) -> float | None:
    """Return the wait that a 429 asks for: the Hub's own `ratelimit` header, else `Retry-After`, in seconds
    or as a date.
    """
    limit = parse_ratelimit_headers(headers)
    if limit is not None and limit.remaining == 0:
        return float(limit.reset_in_seconds)
    text = next((value.strip() for name, value in headers.items() if name.lower() == "retry-after"), "")
    if text.isdecimal():
        return float(text)
    try:
        until = parsedate_to_datetime(text)
    except ValueError:
        return None
    until = until if until.tzinfo else until.replace(tzinfo=UTC)
    return max(0.0, (until - datetime.now(UTC)).total_seconds())
