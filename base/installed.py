"""Which Python distributions are installed, and in which version. Scalegate itself may not be installed."""

from functools import cache
from importlib import metadata

NOT_INSTALLED = "not installed"
"""The text that is shown instead of a version."""
KERNEL_PACKAGES = ("scalegate", "torch", "triton", "humming-kernels", "gemlite", "mslk")
"""Distributions that contain kernels. Another version of one may be faster or slower."""


def installed_version(distribution: str) -> str | None:
    """Return the installed version of a distribution; None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def own_version() -> str:
    """Return Scalegate's version."""
    return installed_version("scalegate") or NOT_INSTALLED


@cache
def installed_package(distribution: str) -> str | None:
    """Return None if the distribution is installed; otherwise the reason for which a layout refuses."""
    if installed_version(distribution) is None:
        return f"package not installed: pip install {distribution}"
    return None


def kernel_versions() -> dict[str, str]:
    """Return the installed versions of all distributions that a measurement depends on."""
    found = {package: installed_version(package) for package in KERNEL_PACKAGES}
    return {package: version for package, version in found.items() if version is not None}
