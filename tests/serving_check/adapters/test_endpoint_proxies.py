"""Servers are asked directly, whatever proxies the environment names."""

import sys
from pathlib import Path

from scalegate.serving_check.adapters import SubprocessEndpoint, UrlEndpoint

COUNTING_SERVER = Path(__file__).parents[1] / "counting_server.py"
NOBODY = "http://127.0.0.1:9"


def test_a_proxy_that_nobody_answers_at_is_not_asked(monkeypatch, tmp_path):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, NOBODY)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    server = [sys.executable, "-P", str(COUNTING_SERVER), "0.001"]
    with SubprocessEndpoint(server, "counting", log=tmp_path / "log.txt") as started:
        endpoint = UrlEndpoint(started.base_url).start()
        assert endpoint.metrics()
        assert endpoint.complete({"prompt": [1], "max_tokens": 2}, timeout=10) is not None
