"""An engine that is only a URL: somebody else started the server."""

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
