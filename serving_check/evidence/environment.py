"""The machine and software of a measurement, so that readers can tell whether it applies to them."""

import os
import platform

import torch

from ...base.installed import installed_version
from ...base.option_fields import OptionValue
from ...layouts.choosing.plan import device_name
from .verdict import Environment

PACKAGES = (
    "scalegate",
    "torch",
    "transformers",
    "triton",
    "torchao",
    "humming-kernels",
    "gemlite",
    "mslk",
    "vllm",
)


def describe_environment(
    device: str,
    dtype: str,
    engine: str,
    baseline_engine: str,
    engine_options: dict[str, OptionValue] | None = None,
    baseline_engine_options: dict[str, OptionValue] | None = None,
    engine_versions: dict[str, dict[str, str]] | None = None,
) -> Environment:
    """Return the environment of a measurement on this machine, now."""
    return Environment(
        device=device_name(torch.device(device)),
        engine=engine,
        baseline_engine=baseline_engine,
        dtype=dtype,
        versions=package_versions(),
        platform=platform.platform(),
        cpu_count=os.cpu_count() or 1,
        engine_options=engine_options,
        baseline_engine_options=baseline_engine_options,
        engine_versions=engine_versions or {},
    )


def package_versions() -> dict[str, str]:
    """Return Python's version and those of the installed packages that a figure may depend on."""
    found = {package: installed_version(package) for package in PACKAGES}
    installed = {package: version for package, version in found.items() if version is not None}
    return {"python": platform.python_version()} | installed
