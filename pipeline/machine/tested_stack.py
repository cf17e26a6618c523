"""Which installed packages are outside the versions that Scalegate was tested with.

The bounds are those of `pyproject.toml`, read from the installed distribution; nothing else states them.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata

from packaging.requirements import Requirement

from ...base.installed import installed_version
from ...base.log import logger

WARNED = "SCALEGATE_UNTESTED_SAID"
"""Environment variable that keeps a command's other processes from repeating the warning."""


@dataclass(frozen=True)
class UntestedPackage:
    """A package whose installed version is outside its bounds."""

    package: str
    installed: str
    tested: str
    """The bounds of the tested versions, such as `>=2.11,<2.16`."""

    def __str__(self) -> str:
        return f"{self.package} {self.installed} (tested: {self.tested})"


def untested_packages() -> list[UntestedPackage]:
    """Return packages outside their bounds; empty if Scalegate is not installed, when there are no bounds to
    read."""
    return list(_outside_bounds())


def as_sentence(untested: list[UntestedPackage]) -> str:
    return (
        f"not tested with {', '.join(map(str, untested))}; "
        "if something fails, install versions within these bounds"
    )


def warn_if_untested() -> None:
    """Warn in one line on stderr, once for a command and all processes that it starts."""
    untested = [] if WARNED in os.environ else untested_packages()
    if untested:
        os.environ[WARNED] = "1"
        logger.warning(f"Scalegate was {as_sentence(untested)}")


def _outside_bounds() -> Iterator[UntestedPackage]:
    try:
        requirements = metadata.requires("scalegate") or []
    except metadata.PackageNotFoundError:
        return
    for requirement in map(Requirement, requirements):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        installed = installed_version(requirement.name)
        if installed is not None and not requirement.specifier.contains(installed, prereleases=True):
            bounds = sorted(map(str, requirement.specifier), reverse=True)
            yield UntestedPackage(requirement.name, installed, ",".join(bounds))
