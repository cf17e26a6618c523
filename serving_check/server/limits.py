"""Limits for each client, as options: `pipeline serve` takes them from here."""

from dataclasses import dataclass

from ...base.option_fields import check_options, option

MIB = 1 << 20


@dataclass(frozen=True)
class ServerLimits:
    """The limits, each of which is checked before the work that it limits is done. A value that is not
    allowed raises UserError.
    """

    max_body_mib: int = option(4, "Largest request body, in MiB; a larger body is answered 413.", minimum=1)
    max_prompts: int = option(
        1024,
        "The most prompts in one request, each counted `n` times; a request with more is answered 413.",
        minimum=1,
    )
    max_connections: int = option(
        4096, "The most connections at a time; further connections are answered 503 and closed.", minimum=1
    )
    header_seconds: int = option(
        10,
        "Seconds that a request's headers may take after connecting; a slower request is answered 408.",
        minimum=1,
    )
    body_seconds: int = option(
        60, "Seconds that a request's body may take; a slower request is answered 408.", minimum=1
    )
    unread_seconds: int = option(
        120,
        "Seconds that a client may leave an answer unread before the client is cut off.",
        minimum=1,
    )
    text_seconds: int = option(
        10,
        "Seconds that chat template and tokenizer may take for a request; a slower request is answered 400.",
        minimum=1,
    )
    protect_all: bool = option(
        False, "Ask for the API key on /metrics, /version and /docs too; /health alone stays open."
    )

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def max_body_bytes(self) -> int:
        return self.max_body_mib * MIB
