"""The one line a server prints when it serves, by which a parent learns the port that the server chose."""

import re
from pathlib import Path

_READY = re.compile(r"^Serving .* on (https?://\S+)$", re.MULTILINE)


def ready_line(model: str, base_url: str) -> str:
    return f"Serving {model} on {base_url}"


def find_base_url(log: Path) -> str | None:
    """Return the URL in the ready line of `log`; None until there is one."""
    try:
        match = _READY.search(log.read_text(errors="replace"))
    except OSError:
        return None
    return match.group(1) if match else None
