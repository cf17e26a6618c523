"""The address of an OpenAI-compatible server, and its own description; plain data and two small reads.

Servers are started by `subprocess_endpoint.py`, and workloads are sent by `..workload`.
"""

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...base.errors import UserError
from .prometheus_text import parse_metrics, total
from .series import SCALEGATE_SERIES, Series

REFUSALS = (400, 422)
"""The HTTP statuses with which servers refuse a field that they do not know."""
PROBE_S = 60.0
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Requests without a proxy: most servers run on this machine, and the measured load never uses a proxy."""


@dataclass(frozen=True)
class Endpoint:
    """A running server: its address and its model."""

    base_url: str
    """The server's address without a trailing slash and without /v1: `http://127.0.0.1:8000`."""
    model: str
    api_key: str | None = None
    series: Series = SCALEGATE_SERIES
    """The names under which the server's `/metrics` give each figure."""
    takes_return_token_ids: bool = True
    """Whether a request may ask for token ids beside the text, as in vLLM and our server."""
    from_log: Callable[[], Mapping[str, float]] = field(default=dict, compare=False)
    """Figures that the server writes only to its log, by the names of their series."""
    kernels: Callable[[], tuple[str, ...]] = field(default=tuple, compare=False)
    """The kernels that the server's log names."""
    takes_repetition_penalty: bool = True
    """Whether a request may turn off the repetition penalty of the model's `generation_config.json`."""
    resident_bytes: Callable[[], int | None] = field(default=lambda: None, compare=False)
    """Resident memory of the server's processes; None if they were not started on this machine."""
    metrics_renewal_s: float = 0.0
    """For how many seconds, at most, `/metrics` shows old figures after the last request has ended."""
    processes: Callable[[], Sequence[int]] = field(default=list, compare=False)
    """Ids of the server's processes; empty if they were not started here."""

    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    def metrics(self) -> dict[str, float]:
        """Return the values of `/metrics` by `name{labels}`; empty if the server has no metrics or has
        ended.
        """
        try:
            return {**parse_metrics(_get(self.base_url + "/metrics", self.headers())), **self.from_log()}
        except (OSError, UnicodeDecodeError):
            return {}

    def memory_bytes(self, samples: Mapping[str, float]) -> int | None:
        """Return the resident bytes of the server's processes: from `samples` of its `/metrics`, else as this
        machine sees the processes; None if neither is known."""
        told = total(samples, self.series.memory)
        return self.resident_bytes() if told is None else int(told)

    def complete(self, body: Mapping[str, Any], timeout: float) -> dict[str, Any] | None:
        """Return the first choice that `/v1/completions` returns for `body`; None if the server fails."""
        choices = self.complete_all(body, timeout)
        return choices[0] if choices else None

    def complete_all(self, body: Mapping[str, Any], timeout: float) -> list[dict[str, Any]] | None:
        """Return all choices that `/v1/completions` returns for `body`, by index; None if the server
        fails.
        """
        request = urllib.request.Request(
            self.base_url + "/v1/completions",
            data=json.dumps({"model": self.model, **body}).encode(),
            headers={"Content-Type": "application/json", **self.headers()},
        )
        try:
            with DIRECT.open(request, timeout=timeout) as response:
                choices = json.load(response)["choices"]
                return sorted(choices, key=lambda choice: int(choice.get("index", 0)))
        except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError, AttributeError):
            return None


class UrlEndpoint:
    """An engine that somebody else started; `start` only checks the engine, `stop` does nothing."""

    def __init__(self, url: str, api_key: str | None = None):
        self.url = url.rstrip("/").removesuffix("/v1")
        self.api_key = api_key

    def start(self) -> Endpoint:
        """Return the endpoint; its model is the first that `/v1/models` lists."""
        endpoint = Endpoint(self.url, first_model(self.url, self.api_key), self.api_key)
        return replace(
            endpoint,
            takes_return_token_ids=_takes(endpoint, {"return_token_ids": True}),
            takes_repetition_penalty=_takes(endpoint, {"repetition_penalty": 1.0}),
        )

    def stop(self) -> None:
        """Leave the server as it was."""

    def __enter__(self) -> Endpoint:
        return self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.stop()


def first_model(base_url: str, api_key: str | None = None) -> str:
    """Return the id of the first model that `/v1/models` lists."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        return str(json.loads(_get(base_url + "/v1/models", headers))["data"][0]["id"])
    except urllib.error.HTTPError as error:
        hint = "; a server that is validated must need no API key" if error.code == 401 else ""
        raise UserError(f"{base_url}/v1/models answered {error.code} {error.reason}{hint}") from error
    except OSError as error:
        reason = getattr(error, "reason", error)
        raise UserError(
            f"no server answers at {base_url} ({reason}); start the server, or check the URL"
        ) from error
    except ValueError as error:
        if isinstance(error, json.JSONDecodeError):
            raise UserError(
                f"{base_url}/v1/models did not answer with JSON; give the URL of an OpenAI-style server"
            ) from error
        raise UserError(
            f"{base_url!r} is not a URL ({error}); give a URL such as http://HOST:PORT"
        ) from error
    except (KeyError, IndexError, TypeError) as error:
        raise UserError(f"{base_url}/v1/models lists no model; start the server with a model") from error


def is_healthy(base_url: str) -> bool:
    """Say whether `/health` answers 200 now."""
    try:
        _get(base_url + "/health", {})
    except OSError:
        return False
    return True


def _takes(endpoint: Endpoint, extra: dict[str, object]) -> bool:
    """Say whether the server accepts a completion of one token with the given additional fields."""
    body = {"model": endpoint.model, "prompt": [1], "max_tokens": 1, **extra}
    headers = {"Content-Type": "application/json", **endpoint.headers()}
    request = urllib.request.Request(
        endpoint.base_url + "/v1/completions", json.dumps(body).encode(), headers
    )
    try:
        DIRECT.open(request, timeout=PROBE_S).close()
    except urllib.error.HTTPError as error:
        return error.code not in REFUSALS
    except OSError:
        return True
    return True


def _get(url: str, headers: dict[str, str]) -> str:
    with DIRECT.open(urllib.request.Request(url, headers=headers), timeout=10) as response:
        return response.read().decode()
