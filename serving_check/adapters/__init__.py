"""Engines to validate on, each in a file of its own, and the endpoints that their servers answer at."""

from .endpoint import Endpoint, UrlEndpoint
from .subprocess_endpoint import SubprocessEndpoint, Telemetry

__all__ = ["Endpoint", "SubprocessEndpoint", "Telemetry", "UrlEndpoint"]
