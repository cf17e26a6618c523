"""Whether an optional kernel package is there; a layout that needs one asks here before it imports it."""

from functools import cache
from importlib import metadata


@cache
def installed_package(distribution: str) -> str | None:
    """None where it is installed, otherwise the reason a layout gives for refusing."""
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return f"package not installed: pip install {distribution}"
    return None
