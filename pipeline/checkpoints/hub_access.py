"""The conditions for a request to the Hub: usable proxies and a token that can be sent."""

import os

import httpx
from huggingface_hub import get_token

from ...base.errors import UserError

PROXY_VARIABLES = ("ALL_PROXY", "all_proxy", "HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy")


def require_hub_access() -> None:
    """Raise UserError, with the variable and a remedy, if no request to the Hub could even be sent."""
    try:
        httpx.Client().close()
    except (ValueError, ImportError) as error:
        named = [f"{name}={os.environ[name]}" for name in PROXY_VARIABLES if os.environ.get(name)]
        remedy = (
            "`pip install 'httpx[socks]'`"
            if isinstance(error, ImportError)
            else "write it as http://HOST:PORT or socks5://HOST:PORT, or unset it"
        )
        raise UserError(f"the Hub cannot be asked through {', '.join(named)} ({error}); {remedy}") from error
    token = get_token()
    if token is not None and not (token.isascii() and token.isprintable() and " " not in token):
        raise UserError(
            "the Hub's access token holds characters that no token has; copy it again into HF_TOKEN, or log "
            "in with `hf auth login`"
        )
