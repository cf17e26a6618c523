"""Which distributions are installed, our own among them: a tree can be used without being installed."""

from functools import cache
from importlib import metadata

NOT_INSTALLED = "not installed"
"""What stands in the place of a version."""
KERNEL_PACKAGES = ("scalegate", "torch", "triton", "humming-kernels", "gemlite", "mslk")
"""Distributions that bring kernels: another version of one may measure differently."""


def installed_version(distribution: str) -> str | None:
    """None where it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def own_version() -> str:
    """Scalegate's."""
    return installed_version("scalegate") or NOT_INSTALLED


@cache
def installed_package(distribution: str) -> str | None:
    """None where it is installed, otherwise the reason a layout gives for refusing."""
    if installed_version(distribution) is None:
        return f"package not installed: pip install {distribution}"
    return None


def kernel_versions() -> dict[str, str]:
    """The installed versions of everything a measurement depends on."""
    found = {package: installed_version(package) for package in KERNEL_PACKAGES}
    return {package: version for package, version in found.items() if version is not None}
