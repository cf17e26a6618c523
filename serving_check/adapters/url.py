"""A server that somebody else started, as an engine to validate on: its URL stands in the engine's place."""

from .endpoint import UrlEndpoint
from .engine import Availability, Engine
from .series import SCALEGATE_SERIES

URL = Engine(
    name="URL",
    title="another server",
    server=lambda job: UrlEndpoint(job.engine),
    availability=lambda: Availability(
        True, "any OpenAI-compatible server that is running, as http://HOST:PORT"
    ),
    series=SCALEGATE_SERIES,
    options=frozenset(),
    starts=False,
    prefixes=("http://", "https://"),
)
