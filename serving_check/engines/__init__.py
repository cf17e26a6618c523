"""Servers to be loaded: one already running, one started here, vLLM."""

from .endpoint import Endpoint, UrlEndpoint
from .subprocess_endpoint import SubprocessEndpoint
from .vllm import vllm_endpoint

__all__ = ["Endpoint", "SubprocessEndpoint", "UrlEndpoint", "vllm_endpoint"]
